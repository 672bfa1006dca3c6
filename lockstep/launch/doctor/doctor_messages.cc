#include "lockstep/launch/doctor/doctor_messages.h"

#include <algorithm>
#include <array>

#include "lockstep/base/parse.h"
#include "lockstep/base/telemetry/flight_ring.h"

namespace lockstep::launcher::doctor {

namespace {

std::string printable_lines(std::string_view text) {
  return base::joined(base::split(text, '\n'), "\n", [](std::string line) {
    std::ranges::replace(line, '\t', ' ');
    return base::telemetry::printable(line);
  });
}

}  // namespace

void fields(Is<ProgramFile> auto& program, auto& field) {
  field(program.path);
  field(program.error);
  field(program.hash);
  field(program.loader);
  field(program.python);
}

/// The output keeps its lines.
void tool_fields(Is<process::ToolResult> auto& tool, auto& field) {
  field(tool.path);
  field(tool.code);
  field(Raw{tool.out});
  field(Raw{tool.err});
}

auto tools_of(auto& facts) {
  return std::array{&facts.libraries, &facts.python, &facts.probe, &facts.nvidia_smi, &facts.resolved, &facts.mpirun};
}

void fields(Is<HostFacts> auto& facts, auto& field) {
  field(facts.program);
  for (auto* tool : tools_of(facts)) tool_fields(*tool, field);
  field(facts.orted);
  field(facts.cpus_online);
  field(facts.memory_bytes);
  field(facts.available_bytes);
  field(facts.memory_cgroup);
  field(facts.shm_bytes);
  field(facts.shm_free_bytes);
  field(facts.memlock_bytes);
  field(facts.files_soft);
  field(facts.files_hard);
  field(facts.infiniband);
  field(facts.huge_pages);
  field(facts.huge_pages_free);
  field(facts.huge_page_bytes);
  field(facts.transparent_huge_pages);
  field(facts.copy_bytes_per_s);
  field(facts.addresses);
}

std::string encode_host_facts(const HostFacts& facts) { return protocol::encoded(facts); }

HostFacts decode_host_facts(std::string_view bytes) {
  HostFacts facts = protocol::decoded<HostFacts>(bytes);
  for (process::ToolResult* tool : tools_of(facts))
    for (std::string* text : {&tool->out, &tool->err}) *text = printable_lines(*text);
  return facts;
}

}  // namespace lockstep::launcher::doctor
