#include "lockstep/train/step_error.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <vector>

namespace lockstep::train {
namespace {

constexpr std::size_t kMostIndices = 16;

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

}  // namespace

std::string place_of_batch(const std::string& what, const StepPlace& place, const Batches& batches) {
  const std::vector<std::size_t> indices = batches.indices();
  std::string samples;
  for (std::size_t i = 0; i < std::min(indices.size(), kMostIndices); ++i)
    samples += (i == 0 ? "" : ", ") + std::to_string(indices[i]);
  if (indices.size() > kMostIndices) samples += " and " + std::to_string(indices.size() - kMostIndices) + " more";
  return what + " of step " + std::to_string(place.step + 1) + " (epoch " + std::to_string(place.epoch + 1) +
         ", batch " + std::to_string(place.batch + 1) + ", samples " + samples + ")";
}

void throw_step_error(const std::string& what, const StepPlace& place, const Batches& batches) {
  const std::string where = place_of_batch(what, place, batches) + ": ";
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
    std::throw_with_nested(StepError(base::Cause::kRankExited, where + "an exception that is no std::exception"));
  }
}

}  // namespace lockstep::train
