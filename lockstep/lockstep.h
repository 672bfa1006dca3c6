// The public API of Lockstep in one header.
#pragma once

#include "lockstep/amp/autocast.h"
#include "lockstep/amp/finite_checker.h"
#include "lockstep/amp/grad_scaler.h"
#include "lockstep/amp/master_weights.h"
#include "lockstep/amp/precision.h"
#include "lockstep/base/error.h"
#include "lockstep/checkpoint/checkpointer.h"
#include "lockstep/checkpoint/module_io.h"
#include "lockstep/checkpoint/optimizer_state.h"
#include "lockstep/checkpoint/torch_file/torch_file.h"
#include "lockstep/comm/arena/arena_stats.h"
#include "lockstep/comm/group.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/uncaught_exception.h"
#include "lockstep/data/loader.h"
#include "lockstep/data/seed.h"
#include "lockstep/ddp/ddp.h"
#include "lockstep/ddp/hooks/bf16_compress_hook.h"
#include "lockstep/ddp/hooks/int8_hook.h"
#include "lockstep/ddp/hooks/power_sgd_hook.h"
#include "lockstep/ddp/replicas.h"
#include "lockstep/launch/launch.h"
#include "lockstep/nn/data_parallel.h"
#include "lockstep/nn/recompute.h"
#include "lockstep/nn/sync_batch_norm.h"
#include "lockstep/optim/adagrad.h"
#include "lockstep/optim/adam.h"
#include "lockstep/optim/clip_grad.h"
#include "lockstep/optim/ema.h"
#include "lockstep/optim/lamb.h"
#include "lockstep/optim/lars.h"
#include "lockstep/optim/schedules/reduce_lr_on_plateau.h"
#include "lockstep/optim/schedules/schedule.h"
#include "lockstep/optim/schedules/scheduler.h"
#include "lockstep/optim/sgd.h"
#include "lockstep/train/trainer.h"
#include "lockstep/train/training_state.h"

namespace lockstep {

using base::CommError;
using base::Deadline;
using base::DesyncError;
using base::Error;
using base::FormatError;
using base::PeerLostError;
using base::TimeoutError;
using base::UsageError;

using amp::Autocast;
using amp::GradScaler;

using comm::BusyScope;
using comm::CallOptions;
using comm::Group;
using comm::init;
using comm::InitOptions;
using comm::kPreemptedExitCode;
using comm::main;
using comm::ReduceOp;
using comm::Work;
using comm::arena::arena_stats;
using comm::arena::ArenaStats;
using comm::arena::trim_arena;

using ddp::broadcast_optimizer_state;
using ddp::broadcast_parameters;
using ddp::BufferMode;
using ddp::DdpOptions;
using ddp::DiLoCo;
using ddp::DistributedDataParallel;
using ddp::join;
using ddp::JoinOptions;
using ddp::Payload;
using ddp::SparseLoCo;

using nn::convert_sync_batch_norm;
using nn::DataParallel;
using nn::DataParallelOptions;
using nn::SyncBatchNorm;

using data::seed_everything;

using optim::clip_grad_norm;
using optim::clip_grad_value;

using checkpoint::load;
using checkpoint::save;

using training::Trainer;
using training::TrainerOptions;
using training::TrainingState;

using launcher::launch;
using launcher::LaunchOptions;

}  // namespace lockstep
