// The times after which the launcher, the agents and the ranks act on silence and failures, where one depends on
// another. Times that no other process depends on are in the source that uses them.
#pragma once

#include <chrono>

namespace lockstep::base {

// The health of ranks.

/// A rank increments its heartbeat, and publishes its progress in the store.
inline constexpr std::chrono::seconds kHeartbeatInterval{1};
/// An agent reports the health of its ranks, or that it is alive.
inline constexpr std::chrono::seconds kRankHealthInterval{1};
/// A longer gap between two health samples does not count as a stall: the sampling process was suspended.
inline constexpr std::chrono::seconds kMaxSampleGap{5};
/// The launcher warns about a rank that has had no heartbeat for this time.
inline constexpr std::chrono::seconds kSilenceWarning{5};
/// The shortest limit after which the launcher stops a job because an agent has sent nothing.
inline constexpr std::chrono::seconds kMinAgentSilence{5};
/// After that limit, the launcher waits for another frame, in case it was suspended together with the agent.
inline constexpr std::chrono::seconds kSecondAgentSilence{2};
/// A live rank that has lost its connections to the store reconnects within this time.
inline constexpr std::chrono::seconds kReconnectGrace{2};
/// A rank's limit for waits without progress exceeds the launcher's by this time, so that the launcher acts first.
inline constexpr std::chrono::seconds kLauncherHeadStart{10};

static_assert(kMaxSampleGap > 2 * kRankHealthInterval, "a delayed sample is not a suspension");
static_assert(kSilenceWarning > 2 * (kHeartbeatInterval + kRankHealthInterval), "a late report is not a stall");
static_assert(kMinAgentSilence > 2 * kRankHealthInterval, "a late report is not silence");
static_assert(kSecondAgentSilence > kRankHealthInterval, "a live agent sends a frame in this time");
static_assert(kReconnectGrace > kHeartbeatInterval, "the heartbeat is what reconnects");

// Waits of ranks for each other.

/// LOCKSTEP_TIMEOUT: how long a rank waits for ranks that make no progress, and the launcher for progress of any rank.
inline constexpr std::chrono::seconds kDefaultTimeout{300};
/// LOCKSTEP_JOIN_TIMEOUT: how long init() waits for all ranks.
inline constexpr std::chrono::seconds kDefaultJoinTimeout{60};
/// The same if no launcher has started the ranks on each host: pods of one job may start minutes apart.
inline constexpr std::chrono::seconds kDefaultPodJoinTimeout{600};
/// A rank that waits to connect, or rank 0 for others in init(), says at this interval for what.
inline constexpr std::chrono::seconds kJoinReportInterval{30};

/// A wait publishes itself in the store, and polls it for the first time, after this time.
inline constexpr std::chrono::milliseconds kFirstWaitPoll{200};
/// The longest interval between two polls, in groups of 50 or more ranks.
inline constexpr std::chrono::milliseconds kMaxWaitPollInterval{1000};
/// A wait checks whether the agent has reported a failure of the job.
inline constexpr std::chrono::milliseconds kFailureCheckInterval{100};
/// A longer gap between two polls of a wait does not count as time without progress: this rank itself was stopped.
/// Shorter gaps may be due to a busy store.
inline constexpr std::chrono::seconds kPollOverdue{5};
/// A rank that reaches its limit gives the others this time to publish their waits before it names the absent ranks.
inline constexpr std::chrono::milliseconds kPeersPublishTime{300};
/// A rank whose peer has died gives the launcher this time to publish which rank failed first.
inline constexpr std::chrono::milliseconds kLauncherVerdictTime{500};
/// A rank whose connection to a peer has failed waits this long for the reason.
inline constexpr std::chrono::seconds kTransportFailureReasonTime{1};
/// A rank whose training has ended gives the store this time to take its last values.
inline constexpr std::chrono::seconds kStoreAnswerTimeout{2};
/// A rank that fails and serves the store keeps serving it for this time, so that its peers can read the first cause.
inline constexpr std::chrono::milliseconds kPeersReadTime{1500};

static_assert(kPeersPublishTime > kFirstWaitPoll, "all waits that began before this one are published");
static_assert(kMaxWaitPollInterval >= kFirstWaitPoll);
static_assert(kPollOverdue > 2 * kMaxWaitPollInterval, "a late poll is not a stop");
static_assert(kPeersReadTime > kMaxWaitPollInterval + kFailureCheckInterval, "every waiting rank polls once more");
static_assert(kTransportFailureReasonTime > kPeersPublishTime + kLauncherVerdictTime, "the launcher's verdict is read");

// The end of a job: the launcher judges the first failure, tells the agents to stop the ranks, and waits for the
// agents.

/// A host that has sent no packet for this time is unreachable: connections to it end, after kHostTimeoutMargin. The
/// kernel of a host answers keepalive probes even if the process there is stopped.
inline constexpr std::chrono::seconds kPeerHostTimeout{5};
/// Connections end this much later than the host timeout: their last packet may have arrived a second before the
/// network was interrupted, and the next one is sent up to a second after it works again.
inline constexpr std::chrono::milliseconds kHostTimeoutMargin{1500};
/// After an exit, the launcher waits for the other exits of the same failure. They arrive within a few milliseconds.
inline constexpr std::chrono::milliseconds kFirstFailureWindow{100};
/// If all failures so far are of ranks that have lost a peer, or that say that a rank has left its world, the launcher
/// waits this long for the exit of that rank. Python with torch takes over a second to end, on a busy machine several.
inline constexpr std::chrono::seconds kCulpritWait{15};
/// The launcher waits for the snapshots of the ranks. An agent replies within a few milliseconds.
inline constexpr std::chrono::seconds kSnapshotTimeout{1};
/// The agents wait before SIGTERM: a waiting rank reads the cause within kFailureCheckInterval and exits by itself.
inline constexpr std::chrono::seconds kFailureNotice{1};
/// An agent allows this time for stack dumps. eu-stack takes 0.2 to 1 s for a rank with libtorch.
inline constexpr std::chrono::seconds kStackDumpTimeout{4};
/// The same where the stacks of Python are there already, which say more: eu-stack takes longer for an interpreter.
inline constexpr std::chrono::seconds kPythonDumpTimeout{2};
/// Of this time, the Python interpreters of all ranks get this part, which write their stacks within some 25 ms each.
inline constexpr std::chrono::milliseconds kPythonStackTimeout{1500};
/// The launcher allows this time for stack dumps, before the times of a stop begin.
inline constexpr std::chrono::seconds kStackWait{5};
/// A process that exists this long after SIGKILL is unkillable. The agent reports it and ends.
inline constexpr std::chrono::seconds kUnkillableTimeout{5};
/// The guard kills an agent that still runs this long after the end of its channel.
inline constexpr std::chrono::seconds kGuardTimeout{8};
/// The launcher kills an agent that still runs this long after the time of its SIGKILL.
inline constexpr std::chrono::seconds kAgentExitTimeout{8};
/// After an agent's last frame, the launcher waits for the agent's process (or ssh, or srun), and then kills it.
inline constexpr std::chrono::seconds kAgentReapTimeout{5};
/// The launcher waits for a process that it has killed. It takes longer only if it is blocked in the kernel.
inline constexpr std::chrono::seconds kAgentKillTimeout{1};
/// The launcher closes the channel of an agent that reads nothing for this time.
inline constexpr std::chrono::seconds kAgentSendTimeout{10};
/// The ranks of a host that is unreachable end within this time: its agent detects the same, and kills them.
inline constexpr std::chrono::seconds kUnreachableExitTime{10};
/// The interval of ssh's probes. ssh ends a connection without an answer only after twice the host timeout: after an
/// interruption, the kernel may wait for as long as that lasted until it retransmits what ssh has sent.
inline constexpr std::chrono::seconds kSshAliveInterval{2};
/// Once one connection of a host has timed out, the store's server waits for its other connections to do so, and then
/// publishes which ranks are lost.
inline constexpr std::chrono::milliseconds kUnreachableReportDelay{1500};

static_assert(kLauncherVerdictTime > kFirstFailureWindow, "the launcher publishes its verdict in time");
static_assert(kFailureNotice > kFailureCheckInterval, "a waiting rank notices the failure before SIGTERM");
static_assert(kStackWait > kStackDumpTimeout, "the agent gives up first");
static_assert(kGuardTimeout > kUnkillableTimeout, "the agent gives up first");
static_assert(kAgentExitTimeout > kUnkillableTimeout, "the agent gives up and reports first");
static_assert(kUnreachableExitTime > kPeerHostTimeout + kHostTimeoutMargin + kHeartbeatInterval,
              "the agent has detected the loss and sent SIGKILL");

// `lockstep status` sends requests to the launchers and agents on its host, and a launcher to its agents.

/// The launcher waits for the agents, which reply within a few milliseconds.
inline constexpr std::chrono::seconds kAgentStatusTimeout{1};
/// `lockstep status` waits for the launchers and agents.
inline constexpr std::chrono::seconds kStatusTimeout{3};

static_assert(kStatusTimeout > kAgentStatusTimeout, "the launcher replies first, also without an agent's reply");

// The start of a job, and `lockstep doctor`: the launcher sends requests to agents.

/// The default of --connect-timeout, for ssh.
inline constexpr std::chrono::seconds kDefaultConnectTimeout{10};
/// After the connection to its host, an agent must send its first frame within this time.
inline constexpr std::chrono::seconds kAgentStartTimeout{10};
/// A task of a SLURM step ends if no agent has connected to it within this time.
inline constexpr std::chrono::seconds kStepAgentTimeout{60};
/// An agent waits for the task of its step, which may load its libraries more slowly than the agent starts.
inline constexpr std::chrono::seconds kStepTaskTimeout{9};
/// An agent allows this time for its connections to the launcher, and for those to the other hosts.
inline constexpr std::chrono::seconds kAgentConnectTimeout{5};
/// Once an agent has found a route to the launcher, it waits this long for further ones.
inline constexpr std::chrono::milliseconds kMoreRoutesWait{300};
/// The launcher waits for the replies about routes and connections.
inline constexpr std::chrono::seconds kNetworkReplyTimeout{7};
/// An agent exits if it has received no job within this time. Other hosts may reply slowly.
inline constexpr std::chrono::seconds kJobTimeout{600};
/// The doctor waits for replies to short requests.
inline constexpr std::chrono::seconds kDoctorReplyTimeout{10};
/// An agent allows this time for measuring a link: one second each for round trips and bulk data, and a margin.
inline constexpr std::chrono::seconds kLinkMeasureTimeout{5};
/// The doctor waits for the result of a measurement.
inline constexpr std::chrono::seconds kLinkReplyTimeout{15};
/// An agent allows this time for the tools that collect the facts about its host, which run side by side.
inline constexpr std::chrono::seconds kHostToolTimeout{60};
/// An agent allows this time for hashing the user's program.
inline constexpr std::chrono::seconds kHashTimeout{10};
/// The doctor waits for the facts about a host.
inline constexpr std::chrono::seconds kHostFactsTimeout{90};

static_assert(kStepAgentTimeout > kDefaultConnectTimeout + kAgentStartTimeout, "the launcher gives up first");
static_assert(kStepTaskTimeout < kAgentStartTimeout, "the agent reports the missing task first");
static_assert(kMoreRoutesWait < kAgentConnectTimeout);
static_assert(kNetworkReplyTimeout > kAgentConnectTimeout, "the agent replies first");
static_assert(kDoctorReplyTimeout > kAgentConnectTimeout, "the agent replies first");
static_assert(kLinkReplyTimeout > kAgentConnectTimeout + kLinkMeasureTimeout, "the agent replies first");
static_assert(kHostFactsTimeout > kHostToolTimeout + kHashTimeout, "the agent replies first");
static_assert(kJobTimeout > 2 * kNetworkReplyTimeout, "the network check is over");

}  // namespace lockstep::base
