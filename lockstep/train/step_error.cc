#include "lockstep/train/step_error.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <vector>

namespace lockstep::training {
namespace {

constexpr std::size_t kMaxIndices = 16;

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

}  // namespace

std::string describe_batch(const std::string& what, const StepLocation& location, const BatchRunner& batches) {
  const std::vector<std::size_t> indices = batches.indices();
  std::string samples;
  for (std::size_t i = 0; i < std::min(indices.size(), kMaxIndices); ++i)
    samples += (i == 0 ? "" : ", ") + std::to_string(indices[i]);
  if (indices.size() > kMaxIndices) samples += " and " + std::to_string(indices.size() - kMaxIndices) + " more";
  return what + " of step " + std::to_string(location.step + 1) + " (epoch " + std::to_string(location.epoch + 1) +
         ", batch " + std::to_string(location.batch + 1) + ", samples " + samples + ")";
}

void rethrow_as_step_error(const std::string& what, const StepLocation& location, const BatchRunner& batches) {
  const std::string where = describe_batch(what, location, batches) + ": ";
  try {
    throw;
  } catch (const base::CommError&) {
    throw;
  } catch (const base::Error& error) {
    std::throw_with_nested(StepError(error.cause(), where + error.what(), error.hint()));
  } catch (const c10::Error& error) {
    std::throw_with_nested(StepError(base::Cause::kRankExited, where + first_line(error.what_without_backtrace())));
  } catch (const std::exception& error) {
    std::throw_with_nested(StepError(base::Cause::kRankExited, where + first_line(error.what())));
  } catch (...) {
    std::throw_with_nested(StepError(base::Cause::kRankExited, where + "an exception that is not a std::exception"));
  }
}

}  // namespace lockstep::training
