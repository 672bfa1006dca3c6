// The fake CUDA runtime: devices, streams, events and graphs. For any function that is not defined here, the real
// library reports that there is no driver.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/gpu/fake_gpu.h"
#include "tests/support/gpu/kernels.h"
#include "tests/support/gpu/memory.h"

namespace fake_gpu {

std::string env_variable(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

namespace {

/// The tasks that were enqueued on streams while they were being captured.
struct Graph {
  std::uint64_t number = 0;
  bool is_invalid = false;  // set when a call tries to wait for a captured stream
  std::vector<std::function<void()>> tasks;
};

struct Stream {
  int device = 0;
  Graph* capture = nullptr;
  std::deque<std::function<void()>> tasks;
  bool busy = false;
  bool has_thread = false;
  // In a capture that began on another stream: the tasks of this stream, and how many of them that stream waits for.
  std::uint64_t captured_tasks = 0, joined_tasks = 0;
};

struct Event {
  std::uint64_t recorded = 0, done = 0;
  // The capture in which it was recorded, the stream, and the tasks of the stream before it.
  Graph* capture = nullptr;
  Stream* captured_stream = nullptr;
  std::uint64_t captured_tasks = 0;
};

/// The state of the fake runtime. It is never destroyed, because the threads of streams outlive main().
struct State {
  std::map<int, Stream> defaults;         // by device
  std::vector<int> visible;               // device numbers on the host
  std::vector<Stream*> captured_streams;  // captured because they wait for a stream that is being captured
  // Those that the program has destroyed as well, because streams and events may still refer to them.
  std::vector<std::unique_ptr<Stream>> streams;
  std::vector<std::unique_ptr<Event>> events;
  std::vector<std::unique_ptr<Graph>> graphs;
};

State make_state() {
  State state;
  const int on_host = std::atoi(env_variable("FAKE_GPUS").c_str());
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  if (!visible)
    for (int device = 0; device < on_host; ++device) state.visible.push_back(device);
  std::string list = visible ? visible : "";
  for (std::size_t at = 0; at < list.size();) {
    const std::size_t end = std::min(list.find(',', at), list.size());
    const int device = std::atoi(list.substr(at, end - at).c_str());
    if (device < 0 || device >= on_host) break;  // like CUDA, ignore the rest of the list
    state.visible.push_back(device);
    at = end + 1;
  }
  return state;
}

State& state() {
  static State& all = *new State(make_state());
  return all;
}

thread_local int device_of_thread = 0;
thread_local cudaError_t last_error = cudaSuccess;

void run_stream(Stream& stream) {
  static const auto pause = std::chrono::microseconds(std::atoi(env_variable("FAKE_GPU_DELAY_US").c_str()));
  std::unique_lock lock(mutex());
  for (;;) {
    state_changed().wait(lock, [&] { return !stream.tasks.empty(); });
    const auto task = std::move(stream.tasks.front());
    stream.tasks.pop_front();
    stream.busy = true;
    lock.unlock();
    if (pause.count() > 0) std::this_thread::sleep_for(pause);
    task();
    lock.lock();
    stream.busy = false;
    state_changed().notify_all();
  }
}

bool is_default(void* handle) {
  return handle == nullptr || handle == cudaStreamLegacy || handle == cudaStreamPerThread;
}

Stream& stream_of(void* handle) {
  return is_default(handle) ? state().defaults[device_of_thread] : *static_cast<Stream*>(handle);
}

/// Makes `stream` wait for an event while one of them is being captured. A stream that waits for a captured one is
/// captured as well. The default stream cannot be, and a capture cannot wait for what is not part of it.
cudaError_t wait_in_capture(void* handle, const Event& event) {
  Stream& stream = stream_of(handle);
  if (event.capture && is_default(handle)) {
    event.capture->is_invalid = true;
    return fail(cudaErrorStreamCaptureImplicit);
  }
  if (stream.capture && event.capture != stream.capture) {
    stream.capture->is_invalid = true;
    return fail(cudaErrorStreamCaptureIsolation);
  }
  if (!stream.capture) {
    stream.capture = event.capture;
    stream.captured_tasks = stream.joined_tasks = 0;
    state().captured_streams.push_back(&stream);
  }
  ++stream.captured_tasks;
  event.captured_stream->joined_tasks = std::max(event.captured_stream->joined_tasks, event.captured_tasks);
  return cudaSuccess;
}

/// Returns whether `stream` may be waited for. Waiting for a stream that is being captured invalidates the capture.
bool check_not_capturing(Stream& stream) {
  const std::lock_guard lock(mutex());
  if (stream.capture) stream.capture->is_invalid = true;
  return !stream.capture;
}

void wait_for(Stream& stream) {
  std::unique_lock lock(mutex());
  state_changed().wait(lock, [&] { return stream.tasks.empty() && !stream.busy; });
}

/// Copies on a stream. As in the real runtime, pageable memory has been read and written when the call returns.
cudaError_t copy(void* to, const void* from, std::size_t bytes, void* stream) {
  if (memory_kind(from) == MemoryKind::kPageable) {
    auto staged =
        std::make_shared<std::vector<char>>(static_cast<const char*>(from), static_cast<const char*>(from) + bytes);
    enqueue(stream, [to, staged] { std::memcpy(to, staged->data(), staged->size()); });
  } else {
    enqueue(stream, [to, from, bytes] { std::memmove(to, from, bytes); });
  }
  if (memory_kind(to) == MemoryKind::kPageable) wait_for(stream_of(stream));
  return cudaSuccess;
}

}  // namespace

cudaError_t fail(cudaError_t error) {
  last_error = error;
  return error;
}

bool injected_error(const char* call, cudaError_t& error) {
  static const std::string plan = env_variable("FAKE_CUDA_ERROR");
  const std::size_t colon = plan.find(':');
  if (colon == std::string::npos || plan.substr(0, colon) != call) return false;
  error = fail(static_cast<cudaError_t>(std::atoi(plan.c_str() + colon + 1)));
  return true;
}

std::mutex& mutex() {
  static std::mutex& one = *new std::mutex;
  return one;
}

std::condition_variable& state_changed() {
  static std::condition_variable& one = *new std::condition_variable;
  return one;
}

void enqueue(void* handle, std::function<void()> task) {
  Stream& stream = stream_of(handle);
  const std::lock_guard lock(mutex());
  if (stream.capture) {
    ++stream.captured_tasks;
    return stream.capture->tasks.push_back(std::move(task));
  }
  stream.tasks.push_back(std::move(task));
  if (!std::exchange(stream.has_thread, true)) std::thread([&stream] { run_stream(stream); }).detach();
  state_changed().notify_all();
}

int current_device() { return device_of_thread; }
int host_device_index(int device) { return state().visible.at(static_cast<std::size_t>(device)); }

}  // namespace fake_gpu

using namespace fake_gpu;

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  cudaError_t error{};
  if (injected_error("cudaGetDeviceCount", error)) return error;
  *count = static_cast<int>(state().visible.size());
  return *count > 0 ? cudaSuccess : fail(cudaErrorNoDevice);
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= static_cast<int>(state().visible.size())) return fail(cudaErrorInvalidDevice);
  device_of_thread = device;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = device_of_thread;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* prop, int device) {
  if (device < 0 || device >= static_cast<int>(state().visible.size())) return fail(cudaErrorInvalidDevice);
  std::memset(prop, 0, sizeof *prop);
  std::snprintf(prop->name, sizeof prop->name, "fake GPU");
  const std::string host = env_variable("LOCKSTEP_HOST_ID");
  for (std::size_t i = 0; i < host.size(); ++i) prop->uuid.bytes[i % 15] ^= host[i];
  prop->uuid.bytes[15] = static_cast<char>(host_device_index(device) + 1);
  prop->totalGlobalMem = kDeviceBytes;
  prop->major = 9;
  prop->warpSize = 32;
  prop->multiProcessorCount = 4;
  prop->maxThreadsPerBlock = 1024;
  prop->maxThreadsPerMultiProcessor = 2048;
  prop->maxThreadsDim[0] = prop->maxThreadsDim[1] = prop->maxThreadsDim[2] = 1024;
  prop->maxGridSize[0] = prop->maxGridSize[1] = prop->maxGridSize[2] = 65535;
  prop->sharedMemPerBlock = 48 << 10;
  prop->regsPerBlock = 65536;
  prop->pciBusID = host_device_index(device) + 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int device) {
  std::snprintf(id, static_cast<std::size_t>(length), "0000:%02x:00.0", host_device_index(device) + 1);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return last_error; }

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  cudaError_t error{};
  if (injected_error("cudaMemcpyAsync", error)) return error;
  return copy(to, from, bytes, stream);
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind) {
  copy(to, from, bytes, nullptr);
  wait_for(stream_of(nullptr));
  return cudaSuccess;
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, std::size_t bytes, cudaStream_t stream) {
  return copy(to, from, bytes, stream);
}
cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t stream) {
  enqueue(stream, [=] { std::memset(to, value, bytes); });
  return cudaSuccess;
}
cudaError_t cudaMemset(void* to, int value, std::size_t bytes) { return cudaMemsetAsync(to, value, bytes, nullptr); }

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  const std::lock_guard lock(mutex());
  Stream& made = *state().streams.emplace_back(std::make_unique<Stream>());
  made.device = device_of_thread;
  *stream = reinterpret_cast<cudaStream_t>(&made);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  const std::lock_guard lock(mutex());
  const Stream& one = stream_of(stream);
  return one.tasks.empty() && !one.busy ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (!check_not_capturing(stream_of(stream))) return fail(cudaErrorStreamCaptureUnsupported);
  wait_for(stream_of(stream));
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  enqueue(nullptr, [] {});
  wait_for(stream_of(nullptr));
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* number,
                                     cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**, std::size_t*) {
  const std::lock_guard lock(mutex());
  const Graph* graph = stream_of(stream).capture;
  *status = !graph              ? cudaStreamCaptureStatusNone
            : graph->is_invalid ? cudaStreamCaptureStatusInvalidated
                                : cudaStreamCaptureStatusActive;
  if (graph && number) *number = graph->number;
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return cudaStreamGetCaptureInfo(stream, status, nullptr, nullptr, nullptr, nullptr, nullptr);
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  const std::lock_guard lock(mutex());
  static std::uint64_t count = 0;
  if (stream_of(stream).capture) return fail(cudaErrorIllegalState);
  stream_of(stream).capture = state().graphs.emplace_back(new Graph{.number = ++count}).get();
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  const std::lock_guard lock(mutex());
  Graph* captured = std::exchange(stream_of(stream).capture, nullptr);
  if (!captured) return fail(cudaErrorIllegalState);
  bool joined = true;
  for (Stream* captured_stream : state().captured_streams) {
    captured_stream->capture = nullptr;
    joined = joined && captured_stream->joined_tasks == captured_stream->captured_tasks;
  }
  state().captured_streams.clear();
  if (!captured->is_invalid && !joined) return fail(cudaErrorStreamCaptureUnjoined);
  *graph = captured->is_invalid ? nullptr : reinterpret_cast<cudaGraph_t>(captured);
  return captured->is_invalid ? fail(cudaErrorStreamCaptureInvalidated) : cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, std::size_t* count) {
  *count = reinterpret_cast<Graph*>(graph)->tasks.size();
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long) {
  *made = reinterpret_cast<cudaGraphExec_t>(new Graph(*reinterpret_cast<Graph*>(graph)));
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  for (const auto& task : reinterpret_cast<Graph*>(graph)->tasks) enqueue(stream, task);
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  delete reinterpret_cast<Graph*>(graph);
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  const std::lock_guard lock(mutex());
  *event = reinterpret_cast<cudaEvent_t>(state().events.emplace_back(std::make_unique<Event>()).get());
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  auto* one = reinterpret_cast<Event*>(event);
  std::uint64_t number = 0;
  {
    const std::lock_guard lock(mutex());
    one->capture = stream_of(stream).capture;
    one->captured_stream = &stream_of(stream);
    one->captured_tasks = stream_of(stream).captured_tasks;
    if (one->capture) return cudaSuccess;
    number = ++one->recorded;
  }
  enqueue(stream, [one, number] {
    const std::lock_guard lock(mutex());
    one->done = std::max(one->done, number);
    state_changed().notify_all();
  });
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  const std::lock_guard lock(mutex());
  const auto* one = reinterpret_cast<Event*>(event);
  if (one->capture) return fail(cudaErrorCapturedEvent);
  return one->done == one->recorded ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  std::unique_lock lock(mutex());
  const auto* one = reinterpret_cast<Event*>(event);
  state_changed().wait(lock, [&, number = one->recorded] { return one->done >= number; });
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  *milliseconds = 1;
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  const auto* one = reinterpret_cast<Event*>(event);
  std::uint64_t number = 0;
  {
    const std::lock_guard lock(mutex());
    if (one->capture || (stream_of(stream).capture && one->recorded > 0)) return wait_in_capture(stream, *one);
    number = one->recorded;
  }
  enqueue(stream, [one, number] {
    std::unique_lock lock(mutex());
    state_changed().wait(lock, [&] { return one->done >= number; });
  });
  return cudaSuccess;
}

// The one function of the driver that libtorch looks up in libcuda.so.1.
int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return 0;
}

}  // extern "C"
