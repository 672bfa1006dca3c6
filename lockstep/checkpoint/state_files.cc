#include "lockstep/checkpoint/state_files.h"

#include <cmath>
#include <utility>

#include "lockstep/base/content_hash.h"
#include "lockstep/base/parse.h"
#include "lockstep/base/utf8.h"
#include "lockstep/checkpoint/files/atomic_file.h"
#include "lockstep/checkpoint/files/input_file.h"
#include "lockstep/checkpoint/files/limits.h"
#include "lockstep/checkpoint/safetensors/safetensors.h"
#include "lockstep/checkpoint/strict_json.h"

namespace lockstep::checkpoint {
namespace {

using nlohmann::json;

json to_json(const StateValue& value) {
  if (const auto* const it = std::get_if<bool>(&value)) return *it;
  if (const auto* const it = std::get_if<std::int64_t>(&value)) return *it;
  if (const auto* const it = std::get_if<std::string>(&value)) return *it;
  const double number = std::get<double>(value);
  if (std::isfinite(number)) return number;
  return {{"number", std::isnan(number) ? "nan" : number > 0 ? "inf" : "-inf"}};
}

StateValue from_json(const json& value, const std::string& name, const std::string& file) {
  if (value.is_boolean()) return value.get<bool>();
  if (value.is_number_float()) return value.get<double>();
  if (value.is_string()) return value.get<std::string>();
  if (value.is_number_integer() && !(value.is_number_unsigned() && value.get<std::uint64_t>() > INT64_MAX))
    return value.get<std::int64_t>();
  for (const auto& [text, number] : {std::pair("nan", NAN), std::pair("inf", INFINITY), std::pair("-inf", -INFINITY)})
    if (value == json{{"number", text}}) return double{number};
  throw base::FormatError(file + ":0: the value " + base::quoted(name, 80) + " is " + value.dump().substr(0, 80) +
                          "; expected a bool, a number or a string");
}

std::string read_text(const std::string& path) {
  const files::InputFile file(path);
  if (file.num_bytes() > files::kMaxJsonBytes)
    file.throw_format_error(0, std::to_string(file.num_bytes()) + " bytes of JSON; expected at most " +
                                   std::to_string(files::kMaxJsonBytes));
  std::string text(file.num_bytes(), '\0');
  file.read(0, text.data(), text.size());
  return text;
}

std::string hash_of(std::string_view text) {
  base::ContentHash hash;
  hash.add(text);
  return hash.hex_digest();
}

void check_hash(const std::string& path, const std::string& hash, const Manifest::File& file) {
  if (hash != file.hash)
    throw base::FormatError(path + ":0: the file is damaged or belongs to another checkpoint: its hash is " + hash +
                            "; expected " + file.hash);
}

bool is_json(const Manifest::File& file) { return file.name.ends_with(".json"); }

}  // namespace

std::uint64_t estimate_num_bytes(const StateDict& state) {
  std::uint64_t num_bytes = 1024;
  for (const auto& [name, value] : state) {
    num_bytes += 128 + 2 * name.size();
    if (const auto* const tensor = std::get_if<at::Tensor>(&value);
        tensor && tensor->defined() && tensor->layout() == c10::kStrided)
      num_bytes += tensor->nbytes();
    if (const auto* const text = std::get_if<std::string>(&value)) num_bytes += text->size();
  }
  return num_bytes;
}

std::vector<Manifest::File> write_state(const StateDict& state, const std::string& folder, const std::string& part,
                                        int rank) {
  TensorMap tensors;
  for (const auto& [name, value] : state)
    if (const auto* const tensor = std::get_if<at::Tensor>(&value)) tensors.emplace(name, *tensor);
  std::vector<Manifest::File> files;
  if (!tensors.empty()) {
    const std::string name = part_file_name(part, rank, "safetensors");
    save_tensors(tensors, folder + "/" + name);
    // Reads only the header, since the tensors were hashed while they were written.
    const SafetensorsReader written(folder + "/" + name);
    files.push_back(
        {.name = name, .num_bytes = written.num_bytes(), .hash = written.header_hash(), .part = part, .rank = rank});
  }
  if (tensors.size() < state.size() || tensors.empty()) {
    const std::string text = values_to_json(state);
    if (text.size() > files::kMaxJsonBytes)
      throw base::UsageError("cannot save part " + part + ": its values other than tensors take " +
                             std::to_string(text.size()) + " bytes; expected at most 16 MiB");
    const std::string name = part_file_name(part, rank, "json");
    files::write_file(folder + "/" + name, text);
    files.push_back({.name = name, .num_bytes = text.size(), .hash = hash_of(text), .part = part, .rank = rank});
  }
  return files;
}

StateDict read_state(const std::string& folder, const std::vector<Manifest::File>& files) {
  StateDict state;
  for (const auto& file : files) {
    const std::string path = folder + "/" + file.name;
    if (is_json(file)) {
      const std::string text = read_text(path);
      check_hash(path, hash_of(text), file);
      state.merge(values_from_json(text, path));
    } else {
      const SafetensorsReader reader(path);
      check_hash(path, reader.header_hash(), file);
      for (const auto& [name, entry] : reader.tensors()) state.emplace(name, reader.read(name));
    }
  }
  return state;
}

void verify_file(const std::string& folder, const Manifest::File& file) {
  const std::string path = folder + "/" + file.name;
  if (is_json(file)) return check_hash(path, hash_of(read_text(path)), file);
  const SafetensorsReader reader(path);
  check_hash(path, reader.header_hash(), file);
  reader.verify();
}

std::string values_to_json(const StateDict& state) {
  json values = json::object();
  for (const auto& [name, value] : state) {
    if (std::holds_alternative<at::Tensor>(value)) continue;
    const auto* const text = std::get_if<std::string>(&value);
    if (name.size() > files::kMaxNameBytes || !base::is_utf8(name) || (text && !base::is_utf8(*text)))
      throw base::UsageError("cannot save the value " + base::quoted(name, 80) +
                             (text ? " = " + base::quoted(*text, 80) : "") +
                             "; expected a name of at most 1024 bytes and a string, both UTF-8");
    values[name] = to_json(value);
  }
  return values.dump(1) + "\n";
}

StateDict values_from_json(std::string_view text, const std::string& file) {
  const json values = parse_json(text, 2, file);
  if (!values.is_object()) throw base::FormatError(file + ":0: the JSON is not an object");
  StateDict state;
  for (const auto& [name, value] : values.items()) state.emplace(name, from_json(value, name, file));
  return state;
}

}  // namespace lockstep::checkpoint
