#include "lockstep/checkpoint/manifest.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/base/error.h"
#include "lockstep/checkpoint/files/embedded_hash.h"
#include "tests/support/temp_dir.h"

namespace lockstep::checkpoint {
namespace {

using testing::HasSubstr;

const Manifest kManifest{.step = 120,
                         .world_size = 2,
                         .version = "0.1.0",
                         .files = {{"model.safetensors", 800, std::string(32, 'a'), "model", 0},
                                   {"rng.1.json", 20, std::string(32, '0'), "rng", 1}}};

std::string manifest_error(const std::string& text) {
  return tests::message_of<base::FormatError>([&] { parse_manifest(text, "f"); });
}

// Recomputes the hash of the changed manifest `text`, and returns the reason for which it is rejected.
std::string reason_with_valid_hash(std::string text) {
  text.replace(13, files::kHashDigits, files::kHashPlaceholder);
  files::embed_hash(text, 13);
  return manifest_error(text);
}
std::string with(const std::string& was, const std::string& now) {
  std::string text = to_text(kManifest);
  const auto at = text.find(was);
  EXPECT_NE(at, std::string::npos) << was;
  return text.replace(at, was.size(), now);
}

TEST(Manifest, RoundTrips) {
  EXPECT_EQ(parse_manifest(to_text(kManifest), "f"), kManifest);
  const Manifest none{.step = 0, .world_size = 1, .version = "", .files = {}};
  EXPECT_EQ(parse_manifest(to_text(none), "f"), none);
}

TEST(Manifest, DetectsEveryBitFlipAndTruncation) {
  const std::string good = to_text(kManifest);
  for (std::size_t bit = 0; bit < good.size() * 8; ++bit) {
    std::string bad = good;
    bad[bit / 8] = static_cast<char>(bad[bit / 8] ^ (1 << bit % 8));
    EXPECT_THAT(manifest_error(bad), HasSubstr("f:0: the manifest is damaged")) << bit;
  }
  for (std::size_t cut = 0; cut < good.size(); ++cut) EXPECT_NE(manifest_error(good.substr(0, cut)), "");
  EXPECT_NE(manifest_error(good + " "), "");
}

TEST(Manifest, RejectsUnknownOrInvalidFields) {
  EXPECT_EQ(reason_with_valid_hash(to_text(kManifest)), "");
  EXPECT_THAT(reason_with_valid_hash(with("\"format\":1", "\"format\":2")),
              HasSubstr("the \"format\" 2; expected 1 to 1"));
  EXPECT_THAT(reason_with_valid_hash(with("\"step\":120", "\"step\":-1")),
              HasSubstr("the \"step\" -1; expected 0 to "));
  EXPECT_THAT(reason_with_valid_hash(with("\"step\":120", "\"step\":1.5")), HasSubstr("the \"step\" 1.5"));
  EXPECT_THAT(reason_with_valid_hash(with("\"step\":120", "\"stop\":120")), HasSubstr("has no \"step\""));
  EXPECT_THAT(reason_with_valid_hash(with("\"step\":120", "\"step\":120,\"more\":1")),
              HasSubstr("has the unknown field \"more\""));
  EXPECT_THAT(reason_with_valid_hash(with("\"step\":120", "\"step\":120,\"step\":121")),
              HasSubstr("duplicate key \"step\""));
  EXPECT_THAT(reason_with_valid_hash(with("\"world_size\":2", "\"world_size\":0")), HasSubstr("the \"world_size\" 0"));
  EXPECT_THAT(reason_with_valid_hash(with("\"rank\":1", "\"rank\":2")), HasSubstr("the \"rank\" 2; expected 0 to 1"));
  EXPECT_THAT(reason_with_valid_hash(with("\"files\":[", "\"files\":[[],")), HasSubstr("is not an object"));
  EXPECT_THAT(reason_with_valid_hash(with("\"bytes\":800", "\"bytes\":18446744073709551615")),
              HasSubstr("the \"bytes\" 18446744073709551615"));
  EXPECT_THAT(reason_with_valid_hash(with("\"xxh3_128\":\"aa", "\"xxh3_128\":\"AA")),
              HasSubstr("expected 32 hexadecimal digits"));
  EXPECT_THAT(reason_with_valid_hash(with("rng.1.json", "../../x.json")),
              HasSubstr("has the name \"../../x.json\"; expected PART.safetensors"));
  EXPECT_THAT(reason_with_valid_hash(with("\"part\":\"model\"", "\"part\":\"mo/el\"")), HasSubstr("has the name"));
  EXPECT_THAT(reason_with_valid_hash(
                  with(",{\"name\":\"rng.1.json\"", ",{\"name\":\"model.safetensors\",\"bytes\":1,\"xxh3_128\":\"" +
                                                        std::string(32, 'a') +
                                                        "\",\"part\":\"model\",\"rank\":0},{\"name\":\"rng.1.json\"")),
              HasSubstr("has the file \"model.safetensors\" twice"));
  EXPECT_THAT(reason_with_valid_hash(with("\"files\":[", "\"files\":[[[[[")),
              HasSubstr("nested deeper than the limit of 3 levels"));
  std::string cut = to_text(kManifest);
  cut.pop_back();
  EXPECT_THAT(reason_with_valid_hash(cut), HasSubstr("invalid JSON"));
}

TEST(Manifest, ValidatesPartAndFileNames) {
  for (const std::string& good :
       {std::string("model"), std::string("a"), std::string("Rank_0-x"), std::string(64, 'x')})
    EXPECT_TRUE(is_part_name(good)) << good;
  for (const std::string& bad : {std::string(), std::string("."), std::string("a.b"), std::string("a/b"),
                                 std::string("\xc3\xa4"), std::string("a b"), std::string(65, 'x')})
    EXPECT_FALSE(is_part_name(bad)) << bad;
  EXPECT_EQ(part_file_name("model", 0, "json"), "model.json");
  EXPECT_EQ(part_file_name("model", 12, "safetensors"), "model.12.safetensors");
}

}  // namespace
}  // namespace lockstep::checkpoint
