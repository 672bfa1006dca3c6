#include "lockstep/checkpoint/state_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>

#include "lockstep/base/error.h"
#include "lockstep/checkpoint/files/directory.h"
#include "lockstep/checkpoint/saved_checkpoint.h"
#include "tests/support/temp_dir.h"

namespace lockstep::checkpoint {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using tests::message_of;
using tests::TempDir;

TEST(StateFiles, RoundTripsEveryValueType) {
  const TempDir folder;
  const StateDict state = {{"yes", true},
                           {"epoch", std::int64_t{3}},
                           {"least", INT64_MIN},
                           {"lr", 0.1},
                           {"one", 1.0},
                           {"minus", -0.0},
                           {"inf", INFINITY},
                           {"-inf", -INFINITY},
                           {"nan", NAN},
                           {"tiny", 5e-324},
                           {"text", "\"\xc3\xa4\"\n"},
                           {"weight", torch::arange(6.0).view({2, 3}).t()},
                           {"", std::string()}};
  const auto files = write_state(state, folder.path(), "part", 3);
  ASSERT_EQ(files.size(), 2u);
  EXPECT_EQ(files[0].name, "part.3.safetensors");
  EXPECT_EQ(files[1].name, "part.3.json");
  EXPECT_EQ(files[1].num_bytes, tests::read_file(folder / "part.3.json").size());
  const StateDict again = read_state(folder.path(), files);
  ASSERT_EQ(again.size(), state.size());
  for (const auto& [name, value] : state) {
    ASSERT_EQ(again.at(name).index(), value.index()) << name;
    if (name == "nan")
      EXPECT_TRUE(std::isnan(value_of<double>(again, name)));
    else if (name == "weight")
      EXPECT_TRUE(value_of<at::Tensor>(again, name).equal(value_of<at::Tensor>(state, name)));
    else if (name == "minus")
      EXPECT_TRUE(std::signbit(value_of<double>(again, name)));
    else
      EXPECT_TRUE(std::visit(
          [&](const auto& a) {
            if constexpr (std::is_same_v<std::decay_t<decltype(a)>, at::Tensor>)
              return true;
            else
              return std::get<std::decay_t<decltype(a)>>(again.at(name)) == a;
          },
          value))
          << name;
  }
  EXPECT_THAT(message_of<base::UsageError>([&] { value_of<double>(again, "epoch"); }),
              HasSubstr("the state's value \"epoch\" is an integer; expected a number"));
  EXPECT_THAT(message_of<base::UsageError>([&] { value_of<double>(again, "missing"); }),
              HasSubstr("the state has no value \"missing\""));
}

TEST(StateFiles, WritesOnlyNeededFiles) {
  const TempDir folder;
  EXPECT_EQ(write_state({{"w", torch::ones({1})}}, folder.path(), "a", 0).size(), 1u);
  EXPECT_EQ(write_state({{"n", 1.0}}, folder.path(), "b", 0).size(), 1u);
  const auto none = write_state({}, folder.path(), "c", 0);
  ASSERT_EQ(none.size(), 1u);
  EXPECT_TRUE(read_state(folder.path(), none).empty());
}

TEST(StateFiles, RejectsUnsupportedValues) {
  const TempDir folder;
  const auto reason = [&](const StateDict& state) {
    return message_of<base::UsageError>([&] { write_state(state, folder.path(), "p", 0); });
  };
  EXPECT_THAT(reason({{"x", "\xff"}}), HasSubstr("cannot save the value \"x\" = "));
  EXPECT_THAT(reason({{"\xff", 1.0}}), HasSubstr("both UTF-8"));
  EXPECT_THAT(reason({{"u", at::Tensor()}}), HasSubstr("undefined tensor \"u\""));
  const auto why = [](const std::string& text) {
    return message_of<base::FormatError>([&] { values_from_json(text, "f"); });
  };
  EXPECT_THAT(why("[]"), HasSubstr("f:0: the JSON is not an object"));
  EXPECT_THAT(why("{\"a\":1,\"a\":2}"), HasSubstr("duplicate key \"a\""));
  for (const char* const value : {"null", "[1]", "{}", "{\"number\":1}", "{\"number\":\"x\"}", "18446744073709551615"})
    EXPECT_THAT(why(std::string("{\"a\":") + value + "}"), HasSubstr("the value \"a\" is ")) << value;
  EXPECT_THAT(why("{\"a\":1"), HasSubstr("f:6: invalid JSON"));
  EXPECT_THAT(why("{\"a\":{\"b\":{}}}"), HasSubstr("nested deeper than the limit of 2 levels"));
}

TEST(CheckpointName, SortsBySequence) {
  CheckpointName name;
  ASSERT_TRUE(parse_checkpoint_name("00000012-step-340", name));
  EXPECT_EQ(name.sequence, 12);
  EXPECT_EQ(name.step, 340);
  for (const char* const text : {"00000001-step-0", "99999999-step-9", "123456789-step-1"})
    EXPECT_TRUE(parse_checkpoint_name(text, name)) << text;
  for (const char* const text : {"", "LATEST", "1-step-1", "00000000-step-1", "00000001-step-", "00000001-step-01",
                                 "00000001-step-1x", "-step-1", "00000001-step-1/x", "99999999999999999999-step-1"})
    EXPECT_FALSE(parse_checkpoint_name(text, name)) << text;
  const TempDir folder;
  for (const char* const text :
       {"00000002-step-5/x", "00000010-step-1/x", "00000009-step-70/x", "other/x", ".lockstep-tmp-0/x"})
    folder.write(text, "");
  std::vector<std::string> names;
  for (const auto& found : list_checkpoints(folder.path())) names.push_back(to_text(found));
  EXPECT_THAT(names, ElementsAre("00000010-step-1", "00000009-step-70", "00000002-step-5"));
  EXPECT_TRUE(list_checkpoints(folder / "none").empty());
}

TEST(Directory, CreatesParents) {
  const TempDir folder;
  files::create_directories(folder / "a/b/c");
  files::create_directories(folder / "a/b/c");
  EXPECT_TRUE(files::open_directory(folder / "a/b/c", "it"));
  folder.write("file", "");
  EXPECT_THAT(message_of<base::SystemError>([&] { files::create_directories(folder / "file/b"); }),
              HasSubstr("cannot create the directory"));
}

}  // namespace
}  // namespace lockstep::checkpoint
