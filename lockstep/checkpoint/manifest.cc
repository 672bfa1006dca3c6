#include "lockstep/checkpoint/manifest.h"

#include <algorithm>
#include <set>

#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "lockstep/checkpoint/files/embedded_hash.h"
#include "lockstep/checkpoint/strict_json.h"

namespace lockstep::checkpoint {
namespace {

using nlohmann::json;

constexpr std::string_view kBegin = "{\"xxh3_128\":\"";
constexpr int kFormat = 1;

bool is_hash(std::string_view text) {
  return text.size() == files::kHashDigits && text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

// Takes the fields of a JSON object one by one; check_empty() rejects any that remain.
class JsonFields {
 public:
  JsonFields(json object, const std::string& file, std::string what)
      : object_(std::move(object)), file_(file), what_(std::move(what)) {
    if (!object_.is_object()) throw_format_error("is not an object");
  }
  [[noreturn]] void throw_format_error(const std::string& reason) const {
    throw base::FormatError(file_ + ":0: " + what_ + " " + reason);
  }

  json take(const char* name) {
    const auto found = object_.find(name);
    if (found == object_.end()) throw_format_error(std::string("has no \"") + name + "\"");
    json value = std::move(*found);
    object_.erase(found);
    return value;
  }
  std::string take_string(const char* name) {
    const json value = take(name);
    if (!value.is_string()) throw_format_error(std::string("has a \"") + name + "\" that is not a string");
    return value.get<std::string>();
  }
  std::int64_t take_number(const char* name, std::int64_t low, std::int64_t high) {
    const json value = take(name);
    if (!value.is_number_integer() || (value.is_number_unsigned() && value.get<std::uint64_t>() > INT64_MAX) ||
        value.get<std::int64_t>() < low || value.get<std::int64_t>() > high)
      throw_format_error(std::string("has the \"") + name + "\" " + value.dump().substr(0, 80) + "; expected " +
                         std::to_string(low) + " to " + std::to_string(high));
    return value.get<std::int64_t>();
  }
  void check_empty() const {
    if (!object_.empty()) throw_format_error("has the unknown field " + base::quoted(object_.begin().key(), 80));
  }

 private:
  json object_;
  const std::string& file_;
  const std::string what_;
};

Manifest::File parse_file(json entry, int world_size, const std::string& file) {
  JsonFields fields(std::move(entry), file, "a file of the manifest");
  Manifest::File read{.name = fields.take_string("name"),
                      .num_bytes = static_cast<std::uint64_t>(fields.take_number("bytes", 0, INT64_MAX)),
                      .hash = fields.take_string("xxh3_128"),
                      .part = fields.take_string("part"),
                      .rank = static_cast<int>(fields.take_number("rank", 0, world_size - 1))};
  fields.check_empty();
  if (!is_part_name(read.part) || (read.name != part_file_name(read.part, read.rank, "safetensors") &&
                                   read.name != part_file_name(read.part, read.rank, "json")))
    fields.throw_format_error("has the name " + base::quoted(read.name, 80) +
                              "; expected PART.safetensors, PART.json or PART.RANK.KIND");
  if (!is_hash(read.hash))
    fields.throw_format_error("has the hash " + base::quoted(read.hash, 80) + "; expected 32 hexadecimal digits");
  return read;
}

}  // namespace

bool is_part_name(std::string_view name) {
  return !name.empty() && name.size() <= 64 && std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-';
  });
}

std::string part_file_name(std::string_view part, int rank, std::string_view kind) {
  return std::string(part) + (rank == 0 ? "" : "." + std::to_string(rank)) + "." + std::string(kind);
}

std::string to_text(const Manifest& manifest) {
  nlohmann::ordered_json object = {{"xxh3_128", files::kHashPlaceholder},
                                   {"format", kFormat},
                                   {"step", manifest.step},
                                   {"world_size", manifest.world_size},
                                   {"version", manifest.version}};
  auto& files = object["files"] = nlohmann::ordered_json::array();
  for (const auto& file : manifest.files)
    files.push_back({{"name", file.name},
                     {"bytes", file.num_bytes},
                     {"xxh3_128", file.hash},
                     {"part", file.part},
                     {"rank", file.rank}});
  std::string text = object.dump();
  files::embed_hash(text, kBegin.size());
  return text;
}

Manifest parse_manifest(std::string_view text, const std::string& file) {
  if (!text.starts_with(kBegin) || !files::is_hash_valid(text, kBegin.size()))
    throw base::FormatError(file + ":0: the manifest is damaged: its contents do not match its hash");
  JsonFields fields(parse_json(text, 3, file), file, "the manifest");
  fields.take_string("xxh3_128");
  fields.take_number("format", kFormat, kFormat);
  Manifest manifest{.step = fields.take_number("step", 0, INT64_MAX),
                    .world_size = static_cast<int>(fields.take_number("world_size", 1, INT32_MAX)),
                    .version = fields.take_string("version"),
                    .files = {}};
  json files = fields.take("files");
  fields.check_empty();
  if (!files.is_array()) fields.throw_format_error("has \"files\" that is not a list");
  std::set<std::string> names;
  for (auto& entry : files) {
    manifest.files.push_back(parse_file(std::move(entry), manifest.world_size, file));
    if (!names.insert(manifest.files.back().name).second)
      fields.throw_format_error("has the file " + base::quoted(manifest.files.back().name, 80) + " twice");
  }
  return manifest;
}

}  // namespace lockstep::checkpoint
