#include "lockstep/data/device_prefetcher.h"

#include <ATen/DeviceAccelerator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "lockstep/base/error.h"

namespace lockstep::data {
namespace {

constexpr auto kMinPollInterval = std::chrono::microseconds(20);
constexpr auto kMaxPollInterval = std::chrono::microseconds(500);

at::Stream copy_stream(at::Device device) {
  const c10::impl::VirtualGuardImpl gpus(device.type());
  return gpus.getStreamFromGlobalPool(device.has_index() ? device : gpus.getDevice());
}

}  // namespace

void check_device(at::Device device) {
  if (device.is_cpu()) return;
  const std::string start = "LoaderOptions.device is " + device.str();
  if (!at::accelerator::isAccelerator(device.type()))
    throw base::UsageError(start + ", which is not an accelerator; expected cpu or Group::device()");
  if (!c10::impl::hasDeviceGuardImpl(device.type()))
    throw base::UsageError(start +
                           ", which libtorch cannot use in this process; expected cpu, or Group::device() after "
                           "lockstep::init() found a GPU");
  const int count = c10::impl::VirtualGuardImpl(device.type()).deviceCount();
  if (device.index() >= count || count == 0)
    throw base::UsageError(start + ", but this process has " + std::to_string(count) +
                           " devices of this type; expected " +
                           (count > 0 ? "an index below " + std::to_string(count) + ", or " : "") + "cpu");
}

void pin_memory(void* batch, const BatchVisitor& visitor, at::Device device) {
  const at::NoGradGuard no_grad;
  // Without the guard, a new thread's current device would be another one, and pinning would allocate memory there.
  const c10::DeviceGuard guard(device);
  visitor(batch, [](at::Tensor& tensor) {
    if (tensor.defined() && tensor.is_cpu() && tensor.layout() == at::kStrided) tensor = tensor.pin_memory();
  });
}

DevicePrefetcher::DevicePrefetcher(at::Device device, BatchVisitor visitor)
    : visitor_(std::move(visitor)),
      stream_(copy_stream(device)),
      copy_done_(device.type()),
      consumed_{c10::Event(device.type()), c10::Event(device.type())} {}

bool DevicePrefetcher::wait_for_consumer(base::Deadline deadline) const {
  const c10::Event& previous = consumed_[num_delivered_ % 2];
  for (auto pause = kMinPollInterval; !previous.query(); pause = std::min(pause * 2, kMaxPollInterval)) {
    if (deadline.expired()) return false;
    std::this_thread::sleep_for(pause);
  }
  return true;
}

void DevicePrefetcher::start_copy(void* batch) {
  const at::NoGradGuard no_grad;
  const c10::StreamGuard guard(stream_);
  visitor_(batch, [&](at::Tensor& tensor) {
    if (tensor.defined() && tensor.is_cpu())
      tensor = tensor.to(at::TensorOptions(stream_.device()), /*non_blocking=*/true);
  });
  copy_done_.record(stream_);
}

void DevicePrefetcher::wait_on_current_stream(void* batch) {
  const at::Stream current = c10::impl::VirtualGuardImpl(stream_.device_type()).getStream(stream_.device());
  consumed_[num_delivered_++ % 2].record(current);
  copy_done_.block(current);
  visitor_(batch, [&](at::Tensor& tensor) {
    if (tensor.defined() && tensor.device() == stream_.device()) tensor.record_stream(current);
  });
}

}  // namespace lockstep::data
