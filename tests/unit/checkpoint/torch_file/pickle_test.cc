#include "lockstep/checkpoint/torch_file/pickle.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/base/error.h"
#include "lockstep/checkpoint/files/limits.h"
#include "tests/support/temp_dir.h"

namespace lockstep::checkpoint {
namespace {

using namespace std::string_literals;
using testing::ElementsAre;
using testing::HasSubstr;

// Adds the first and the last opcode to a program.
std::string program(const std::string& opcodes) { return "\x80\x02" + opcodes + "."; }
std::string text(const std::string& value) {
  return "X" + std::string(1, static_cast<char>(value.size())) + "\0\0\0"s + value;
}
const std::string kStorage = "((" + text("storage") + "ctorch\nFloatStorage\n" + text("0") + text("cpu") + "K\x0atQ";
std::string tensor_opcodes(const std::string& offset, const std::string& sizes, const std::string& strides) {
  return "ctorch._utils\n_rebuild_tensor_v2\n" + kStorage + offset + "(" + sizes + "t(" + strides + "t\x89" +
         "ccollections\nOrderedDict\n)RtR";
}

// Returns the error for a program, without the file's name; "" if it is accepted.
std::string pickle_error(const std::string& opcodes) {
  const auto bytes = program(opcodes);
  const auto message = tests::message_of<base::FormatError>([&] { parse_pickle(bytes, "f", 100); });
  EXPECT_TRUE(message.empty() || message.starts_with("f:")) << message;
  return message.empty() ? "" : message.substr(2);
}

/// Returns the only value of a program. A string is copied, because the value refers to the program.
template <typename T, typename Result = T>
Result only(const std::string& opcodes) {
  const auto bytes = program(opcodes);
  const Pickle pickle = parse_pickle(bytes, "f", 0);
  return Result(std::get<T>(pickle.values[pickle.root]));
}

TEST(Pickle, ParsesNumbersStringsAndNone) {
  EXPECT_TRUE(only<bool>("\x88"));
  EXPECT_FALSE(only<bool>("\x89"));
  only<Pickle::None>("N");
  EXPECT_EQ(only<std::int64_t>("K\xff"), 255);
  EXPECT_EQ(only<std::int64_t>("M\x01\x02"), 513);
  EXPECT_EQ(only<std::int64_t>("J\xfb\xff\xff\xff"), -5);
  EXPECT_EQ(only<std::int64_t>("\x8a\x00"s), 0);
  EXPECT_EQ(only<std::int64_t>("\x8a\x01\xff"), -1);
  EXPECT_EQ(only<std::int64_t>("\x8a\x06\x00\x00\x00\x00\x00\x01"s), std::int64_t{1} << 40);
  EXPECT_EQ(only<std::int64_t>("\x8a\x08\x00\x00\x00\x00\x00\x00\x00\x80"s), INT64_MIN);
  EXPECT_EQ(only<double>("G\x3f\xf8\0\0\0\0\0\0"s), 1.5);
  EXPECT_EQ((only<std::string_view, std::string>("U\x02hi")), "hi");
  EXPECT_THAT(pickle_error("\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x00\x01"s),
              HasSubstr("an integer of more than 64 bits"));
  EXPECT_THAT(pickle_error(text("\xff")), HasSubstr("a string that is not UTF-8"));
  const auto bytes = program("c_codecs\nencode\n(" + text("a\xc3\xbf\xc2\x80") + text("latin1") + "tR");
  const Pickle pickle = parse_pickle(bytes, "f", 0);
  EXPECT_EQ(std::get<Pickle::ByteString>(pickle.values[pickle.root]).bytes, "a\xff\x80");
  EXPECT_THAT(pickle_error("c_codecs\nencode\n(" + text("\xc4\x80") + text("latin1") + "tR"),
              HasSubstr("a byte of more than 255"));
  EXPECT_THAT(pickle_error("c_codecs\nencode\n(" + text("a") + text("utf8") + "tR"),
              HasSubstr("an encoding other than latin1"));
}

TEST(Pickle, ParsesContainers) {
  const auto bytes = program("}q\x05(" + text("a") + "K\x01" + text("b") + "](NNeu" + text("c") + ")s" + text("d") +
                             "c__builtin__\nset\n](K\x02" + "e\x85Rs"s);
  const Pickle pickle = parse_pickle(bytes, "f", 0);
  const auto container = [&](Pickle::Index index) { return std::get<Pickle::Container>(pickle.values[index]); };
  const auto dict = container(pickle.root);
  EXPECT_EQ(dict.kind, Pickle::Kind::kDict);
  ASSERT_EQ(dict.items.size(), 8u);
  EXPECT_EQ(container(dict.items[3]).items.size(), 2u);
  EXPECT_EQ(container(dict.items[5]).kind, Pickle::Kind::kTuple);
  EXPECT_EQ(container(dict.items[7]).kind, Pickle::Kind::kSet);
  EXPECT_EQ(only<Pickle::Container>("ccollections\nOrderedDict\n)R}b").kind, Pickle::Kind::kOrderedDict);
  EXPECT_EQ(only<Pickle::Container>("ccollections\nCounter\n}(K\x01K\x02u\x85R").items.size(), 2u);
  EXPECT_EQ(only<Pickle::Container>("ctorch\nSize\n(K\x01K\x02t\x85R").kind, Pickle::Kind::kTuple);
  EXPECT_EQ(only<Pickle::Container>("NNN\x87").items.size(), 3u);
  EXPECT_EQ(pickle_error("]q\x07Na"), "");
}

TEST(Pickle, TensorMustLieInItsStorage) {
  const auto bytes = program(tensor_opcodes("K\x02", "K\x02K\x03", "K\x01K\x02"));
  const Pickle pickle = parse_pickle(bytes, "f", 0);
  const auto& made = pickle.tensors.at(std::get<Pickle::TensorRef>(pickle.values[pickle.root]).index);
  EXPECT_EQ(made.dtype->type, c10::ScalarType::Float);
  EXPECT_EQ(made.offset, 2);
  EXPECT_THAT(made.sizes, ElementsAre(2, 3));
  EXPECT_THAT(made.strides, ElementsAre(1, 2));
  EXPECT_EQ(pickle.storages.at(0).num_elements, 10u);
  EXPECT_EQ(pickle_error(tensor_opcodes("K\x09", "", "")), "");
  EXPECT_EQ(pickle_error(tensor_opcodes("K\x00"s, "K\x0a", "K\x01")), "");
  EXPECT_EQ(pickle_error(tensor_opcodes("K\x00"s, "M\xff\xff", "K\x00"s)), "") << "a stride of 0 repeats an element";
  const std::string most = "\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f";
  for (const auto& outside :
       {tensor_opcodes("K\x0a", "", ""), tensor_opcodes("K\x00"s, "K\x0b", "K\x01"),
        tensor_opcodes("K\x01", "K\x0a", "K\x01"), tensor_opcodes("K\x00"s, "K\x02", "K\x0a"),
        tensor_opcodes(most, "", ""), tensor_opcodes("K\x00"s, most, "K\x00"s), tensor_opcodes("K\x00"s, "K\x02", most),
        tensor_opcodes("K\x00"s, most + "K\x00"s, "K\x01K\x01"), tensor_opcodes("J\xff\xff\xff\xff", "", ""),
        tensor_opcodes("K\x00"s, "K\x01", "")})
    EXPECT_THAT(pickle_error(outside), HasSubstr("lies outside its storage of 10 elements"));
  EXPECT_THAT(pickle_error(tensor_opcodes("K\x00"s, "J\xff\xff\xff\xff", "K\x01")), HasSubstr("a tensor's size of -1"));
}

TEST(Pickle, StorageMustHaveOneTypeAndSize) {
  const auto other = [](const std::string& type, const std::string& number) {
    return kStorage.substr(1) + "((" + text("storage") + "ctorch\n" + type + "\n" + text("0") + text("cpu") + number +
           "tQ0";
  };
  EXPECT_THAT(pickle_error(other("FloatStorage", "K\x0b")),
              HasSubstr("the storage \"0\" occurs twice, with different types or sizes"));
  EXPECT_THAT(pickle_error(other("LongStorage", "K\x0a")), HasSubstr("occurs twice"));
  EXPECT_THAT(pickle_error("(" + text("storage") + "ctorch\nFloatStorage\n" + text("../x") + text("cpu") + "K\x01tQ"),
              HasSubstr("invalid storage \"../x\""));
  EXPECT_THAT(
      pickle_error("(" + text("storage") + "ctorch\nFloatStorage\n" + text("0") + text("cpu") + "J\xff\xff\xff\xfftQ"),
      HasSubstr("of -1 elements"));
  EXPECT_THAT(pickle_error("(" + text("module") + "NNNNtQ"), HasSubstr("expected "));
}

TEST(Pickle, RejectsUnknownGlobalsAndOpcodes) {
  for (const std::string global :
       {"os\nsystem", "posix\nsystem", "builtins\neval", "__builtin__\neval", "builtins\ngetattr", "torch\nload",
        "torch._utils\n_rebuild_qtensor", "torch\nQInt8Storage", "collections\nordereddict", "torch.jit\nload"})
    EXPECT_THAT(pickle_error("c" + global + "\n"), HasSubstr("unsupported global \"")) << global;
  // INST, OBJ, EXT1, STACK_GLOBAL, REDUCE of a string, of a list, frames and out-of-band buffers.
  for (const std::string opcode :
       {"i", "o", "\x82", "\x93", "\x95", "\x97", "P", "S", "V",    "I",    "F",    "L",   "d",
        "l", "p", "g",    "0",    "1",    "2",    "B", "C", "\x8b", "\x8c", "\x90", "\x94"})
    EXPECT_THAT(pickle_error("N" + opcode), HasSubstr("unsupported opcode ")) << opcode;
  EXPECT_THAT(pickle_error("NR"), HasSubstr("expected a tuple of arguments"));
  EXPECT_THAT(pickle_error(text("x") + ")R"), HasSubstr("expected a function to call"));
  EXPECT_THAT(pickle_error("ccollections\nOrderedDict\n(NtR"), HasSubstr("a call with 1 arguments"));
  EXPECT_THAT(pickle_error("}}b"), HasSubstr("attributes of a value that is neither an OrderedDict nor a module"));
  EXPECT_THAT(pickle_error("ccollections\nOrderedDict\n"),
              HasSubstr("found a function, a storage or a dtype; expected a value"));
  EXPECT_THAT(pickle_error("ctorch\nfloat32\n"), HasSubstr("expected a value"));
}

TEST(Pickle, ParsesModulesOfCpp) {
  const std::string module = "c__torch__.___torch_mangle_1\nModule\n)\x81";
  const auto parsed = only<Pickle::Container>(module + "}(" + text("a") + "N" + text("b") + "\x88ub");
  EXPECT_EQ(parsed.kind, Pickle::Kind::kModule);
  EXPECT_EQ(parsed.items.size(), 4u);
  EXPECT_EQ(only<Pickle::Container>("c__torch__\nModule\n)\x81").items.size(), 0u);
  EXPECT_THAT(pickle_error("c__torch__\nModule\n"), HasSubstr("found a function, a storage or a dtype"));
  EXPECT_THAT(pickle_error("c__torch__x\nModule\n)\x81"), HasSubstr("unsupported global"));
  EXPECT_THAT(pickle_error("c__torch__\nModule\n)R"), HasSubstr("expected a function to call"));
  EXPECT_THAT(pickle_error("ccollections\nOrderedDict\n)\x81"), HasSubstr("expected the class of a module"));
  EXPECT_THAT(pickle_error("c__torch__\nModule\nN\x81"), HasSubstr("expected a tuple of arguments"));
  EXPECT_THAT(pickle_error("c__torch__\nModule\nN\x85\x81"), HasSubstr("a module with arguments"));
  EXPECT_THAT(pickle_error(module + "Nb"), HasSubstr("expected a dictionary of attributes"));
  EXPECT_THAT(pickle_error(module + "}(K\x01Nub"), HasSubstr("expected the name of an attribute"));
  EXPECT_THAT(pickle_error(module + "}(" + text("a") + "N" + text("a") + "Nub"), HasSubstr("duplicate key \"a\""));
  EXPECT_THAT(pickle_error(module + "}(" + text("a") + "Nub}(" + text("a") + "Nub"), HasSubstr("are set twice"));
  EXPECT_THAT(pickle_error(module + "q\x01}(" + text("a") + "h\x01ub"), HasSubstr("or contain themselves"));
}

TEST(Pickle, RejectsStackUnderflowAndTruncation) {
  EXPECT_THAT(tests::message_of<base::FormatError>([] { parse_pickle("", "f", 0); }),
              HasSubstr("f:0: the pickle ends here"));
  EXPECT_THAT(tests::message_of<base::FormatError>([] { parse_pickle("\x80\x02", "f", 5); }),
              HasSubstr("f:7: the pickle ends here"));
  EXPECT_THAT(pickle_error(""), HasSubstr("expected one value on the stack at the end"));
  EXPECT_THAT(pickle_error("NN"), HasSubstr("expected one value on the stack at the end"));
  EXPECT_THAT(pickle_error("(N"), HasSubstr("expected one value on the stack at the end"));
  for (const std::string opcodes :
       {"t",  "e",    "u",     "Nt",    "a",      "s",     "Na",     "Ns",    "NNs", "]NNa", "](a", "](Na", "}(NNs",
        "(a", "\x85", "(\x85", "N\x86", "N(\x86", "q\x01", "(q\x01", "h\x01", "b",   "Q",    "R",   "}(Nu"})
    EXPECT_NE(pickle_error(opcodes), "") << opcodes;
  EXPECT_THAT(pickle_error("X\xff\xff\xff\xff"), HasSubstr("the pickle ends here; expected 4294967295 more bytes"));
  EXPECT_THAT(pickle_error("c" + std::string(2000, 'x') + "\n"), HasSubstr("a name of more than 1024 bytes"));
  EXPECT_THAT(tests::message_of<base::FormatError>([] { parse_pickle("\x80\x04N.", "f", 0); }),
              HasSubstr("a protocol other than 2"));
}

TEST(Pickle, RejectsDuplicateAndUnhashableKeys) {
  EXPECT_THAT(pickle_error("}(" + text("a") + "N" + text("a") + "Nu"), HasSubstr("duplicate key \"a\""));
  EXPECT_THAT(pickle_error("}(K\x07NJ\x07\0\0\0Nu"s), HasSubstr("duplicate key 7"));
  EXPECT_EQ(pickle_error("}(K\x07N" + text("7") + "N)NG\0\0\0\0\0\0\0\0Nu"s), "");
  EXPECT_THAT(pickle_error("}]Ns"), HasSubstr("a key is a list, a set, a dictionary or a tensor"));
}

TEST(Pickle, LimitsDepthAndMemory) {
  EXPECT_THAT(pickle_error("]q\x01h\x01"
                           "a"),
              HasSubstr("nested deeper than the limit of 64 levels, or contain themselves"));
  std::string nested, doubled = "]q\x01";
  for (int i = 0; i < 100; ++i) nested += "]";
  EXPECT_THAT(pickle_error(nested + std::string(99, 'a')), HasSubstr("deeper than the limit of 64"));
  EXPECT_EQ(pickle_error(nested.substr(0, 64) + std::string(63, 'a')), "");
  // Each level contains the previous one twice: 2^40 values in 250 bytes.
  for (int i = 0; i < 40; ++i)
    doubled += std::string("](h") + static_cast<char>(1 + i) + "h" + static_cast<char>(1 + i) + "eq" +
               static_cast<char>(2 + i);
  EXPECT_THAT(pickle_error(doubled + "]"),
              testing::AnyOf(HasSubstr("expected one value"), HasSubstr("more than 128 MiB")));
  EXPECT_THAT(pickle_error("]" + std::string("(") + "Ne" + "q\x01" +
                           [] {
                             std::string levels;
                             for (int i = 1; i < 41; ++i)
                               levels += std::string("h") + static_cast<char>(i) + "\x86q" + static_cast<char>(i + 1);
                             return levels;
                           }()),
              HasSubstr("more than 128 MiB"));
  // A long string to which the pickle refers often.
  std::string often = "](" + ("X\0\0\x10\0"s + std::string(1 << 20, 'x')) + "q\x01";
  for (int i = 0; i < 200; ++i) often += "h\x01";
  EXPECT_THAT(pickle_error(often + "e"), HasSubstr("more than 128 MiB"));
  EXPECT_THAT(pickle_error("](" + std::string(files::kMaxPickleBytes - 100, 'N') + "e"),
              HasSubstr("the pickle takes more than the limit of 128 MiB"));
  EXPECT_THAT(pickle_error(std::string(files::kMaxPickleBytes, 'N')), HasSubstr("expected at most 32 MiB"));
}

}  // namespace
}  // namespace lockstep::checkpoint
