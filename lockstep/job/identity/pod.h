// The pod that this process is in, from variables that operators of Kubernetes and other platforms set once for each
// pod. They name pods, not ranks: every process in a pod has the same ones.
#pragma once

#include <optional>
#include <string>

#include "lockstep/base/env.h"
#include "lockstep/base/net/socket.h"

namespace lockstep::job::identity {

struct Pod {
  int index = -1;               ///< from 0; -1: the variables do not say
  int num_pods = -1;            ///< of the job; -1: the variables do not say, or only a range
  int ranks_per_pod = 0;        ///< 0: the variables do not say, or leave it to the launcher ("auto", "gpu", "cpu")
  base::Env::Value host, port;  ///< of pod 0
  std::string variables;        ///< those that say so, with their values: "PET_NODE_RANK=1, PET_NNODES=2"
};

/// Returns the pod that the first of these groups of variables describes:
///   PET_NODE_RANK, PET_NNODES, PET_NPROC_PER_NODE, PET_MASTER_ADDR, PET_MASTER_PORT   Kubeflow: TrainJob, PyTorchJob
///   RANK, WORLD_SIZE, NPROC_PER_NODE, MASTER_ADDR, MASTER_PORT                        Volcano, PAI-DLC, AIHC
///   JOB_COMPLETION_INDEX                                                              JobSet and indexed Jobs
///   SM_CURRENT_HOST, SM_HOSTS                                                         SageMaker
/// Returns nullopt without any, and if this process has variables of its own rank, such as LOCAL_RANK: what started it
/// inside the pod has read those of the pod. Pure. Throws UsageError if a value is not a number.
std::optional<Pod> find_pod(const base::Env& env);

/// Throws UsageError if `pod` is one of several and its variables do not name its index, their number and the first's
/// address.
void check_is_complete(const Pod& pod);
/// Returns the address of the first of several pods. Throws UsageError for an invalid port.
base::net::Address first_address(const Pod& pod);

/// Returns find_pod() if it is one of several, complete pods: the launchers in all of them start one job. Throws
/// UsageError as check_is_complete() does.
std::optional<Pod> find_pod_of_several(const base::Env& env);

}  // namespace lockstep::job::identity
