#include "lockstep/launch/predict/profile_files.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "lockstep/base/error.h"

namespace lockstep::launcher::predict {
namespace {

using Json = nlohmann::json;

double positive(const Json& value) {
  const double number = value.get<double>();
  if (!(number >= 0 && number < 1e18)) throw base::FormatError("a rank's profile has the number " + value.dump());
  return number;
}

StepProfile parse_profile(const Json& file) {
  StepProfile profile;
  profile.ranks = file.at("world_size").get<int>();
  for (const Json& step : file.at("steps_s")) profile.steps_s.push_back(positive(step));
  for (const Json& model : file.at("models")) {
    StepProfile::Model& one = profile.models.emplace_back();
    one.passes_per_step = positive(model.at("passes_per_step"));
    for (const Json& gradient : model.at("gradients"))
      one.gradients.push_back({.bytes = positive(gradient.at("bytes")),
                               .rows = positive(gradient.at("rows")),
                               .columns = positive(gradient.at("columns")),
                               .lead_s = positive(gradient.at("lead_s"))});
  }
  return profile;
}

}  // namespace

StepProfile parse_profiles(const std::vector<std::string>& files) {
  StepProfile all;
  try {
    for (const std::string& file : files) {
      StepProfile one = parse_profile(Json::parse(file));
      if (all.steps_s.empty()) {
        all = std::move(one);
        continue;
      }
      const std::size_t steps = std::min(all.steps_s.size(), one.steps_s.size());
      all.steps_s.resize(steps);
      for (std::size_t i = 0; i < steps; ++i) all.steps_s[i] = std::max(all.steps_s[i], one.steps_s[i]);
      for (std::size_t m = 0; m < std::min(all.models.size(), one.models.size()); ++m) {
        auto& mine = all.models[m].gradients;
        const auto& theirs = one.models[m].gradients;
        for (std::size_t i = 0; i < std::min(mine.size(), theirs.size()); ++i)
          mine[i].lead_s = std::min(mine[i].lead_s, theirs[i].lead_s);
      }
    }
  } catch (const Json::exception& error) {
    throw base::FormatError(std::string("a rank's profile cannot be read: ") + error.what());
  }
  for (StepProfile::Model& model : all.models)
    std::stable_sort(model.gradients.begin(), model.gradients.end(),
                     [](const Gradient& a, const Gradient& b) { return a.lead_s > b.lead_s; });
  return all;
}

}  // namespace lockstep::launcher::predict
