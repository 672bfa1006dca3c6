#include "lockstep/launch/doctor/findings_table.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <sstream>

namespace lockstep::launcher::doctor {
namespace {

constexpr std::size_t kWidth = 80;

std::size_t count(const std::vector<Finding>& findings, Severity severity) {
  return static_cast<std::size_t>(std::count_if(findings.begin(), findings.end(),
                                                [&](const Finding& finding) { return finding.severity == severity; }));
}

std::string padded(std::string text, std::size_t width) {
  text.resize(std::max(text.size(), width), ' ');
  return text;
}

/// Returns `head` and `text`, wrapped between words. Lines after the first are indented by the length of `head`.
std::string wrapped(const std::string& head, const std::string& text) {
  std::string all, line = head;
  std::istringstream words(text);
  bool first = true;
  for (std::string word; words >> word; first = false) {
    if (!first && line.size() + 1 + word.size() > kWidth) {
      all += line + "\n";
      line = std::string(head.size(), ' ') + word;
    } else {
      line += (first ? "" : " ") + word;
    }
  }
  line.erase(line.find_last_not_of(' ') + 1);
  return all + line + "\n";
}

}  // namespace

const char* severity_name(Severity severity) {
  constexpr const char* kNames[] = {"ok", "warn", "bad", "unknown"};
  return kNames[static_cast<int>(severity)];
}

std::string to_table(const std::vector<Finding>& findings) {
  std::size_t host = 4, check = 5;
  for (const Finding& finding : findings) {
    host = std::max(host, std::min<std::size_t>(finding.host.size(), 20));
    check = std::max(check, finding.check.size());
  }
  std::string text;
  for (const Finding& finding : findings) {
    const std::string head = padded(finding.host, host) + "  " + padded(finding.check, check) + "  " +
                             padded(finding.severity == Severity::kBad       ? "BAD"
                                    : finding.severity == Severity::kUnknown ? "?"
                                                                             : severity_name(finding.severity),
                                    4) +
                             "  ";
    text += wrapped(head, finding.value);
    if (!finding.remedy.empty())
      text += wrapped(std::string(std::min<std::size_t>(head.size(), 24), ' ') + "-> ", finding.remedy);
  }
  return text + std::to_string(count(findings, Severity::kBad)) + " bad, " +
         std::to_string(count(findings, Severity::kWarn)) + " warnings, " +
         std::to_string(count(findings, Severity::kUnknown)) + " unknown, " +
         std::to_string(count(findings, Severity::kOk)) + " ok\n";
}

std::string to_json(const std::vector<Finding>& findings) {
  nlohmann::ordered_json all = {{"bad", count(findings, Severity::kBad)},
                                {"warn", count(findings, Severity::kWarn)},
                                {"findings", nlohmann::ordered_json::array()}};
  for (const Finding& finding : findings)
    all["findings"].push_back({{"host", finding.host},
                               {"check", finding.check},
                               {"state", severity_name(finding.severity)},
                               {"value", finding.value},
                               {"remedy", finding.remedy}});
  return all.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

bool has_bad(const std::vector<Finding>& findings) { return count(findings, Severity::kBad) > 0; }

}  // namespace lockstep::launcher::doctor
