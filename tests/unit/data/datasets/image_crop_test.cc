// Tests of random and centre crops, and of ImageFolder.
#include "lockstep/data/datasets/image_crop.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <set>

#include "lockstep/base/error.h"
#include "lockstep/data/datasets/image_folder.h"
#include "tests/support/temp_dir.h"

namespace lockstep::data {
namespace {

using base::UsageError;
using testing::ElementsAre;
using testing::EndsWith;
using testing::HasSubstr;
using tests::message_of;
using tests::TempDir;

/// Expects a mean of `values` within five standard errors of `mean`.
void expect_mean(const std::vector<double>& values, double mean, double deviation) {
  double sum = 0;
  for (const double value : values) sum += value;
  EXPECT_NEAR(sum / static_cast<double>(values.size()), mean,
              5 * deviation / std::sqrt(static_cast<double>(values.size())));
}

TEST(SampleRng, DependsOnSeedEpochAndSampleOnly) {
  std::set<std::uint64_t> seen;
  for (std::uint64_t seed : {0, 1})
    for (std::uint64_t epoch : {0, 1, 2})
      for (std::uint64_t sample : {0, 1, 2, 1000000}) {
        EXPECT_TRUE(seen.insert(SampleRng(seed, epoch, sample).next()).second);
        EXPECT_EQ(SampleRng(seed, epoch, sample).next(), SampleRng(seed, epoch, sample).next());
      }
  SampleRng random(1, 2, 3);
  std::vector<double> values, numbers;
  for (int i = 0; i < 10000; ++i) {
    values.push_back(random.uniform(2, 4));
    numbers.push_back(random.uniform_int(5));
  }
  EXPECT_GE(*std::min_element(values.begin(), values.end()), 2);
  EXPECT_LT(*std::max_element(values.begin(), values.end()), 4);
  EXPECT_EQ(*std::max_element(numbers.begin(), numbers.end()), 4);
  expect_mean(values, 3, 2 / std::sqrt(12.0));
  expect_mean(numbers, 2, std::sqrt(2.0));
}

/// Every box fits into this image, so the first draw always succeeds, and areas, logarithms of aspect ratios and
/// positions are uniform.
TEST(RandomCrop, AreaAspectAndPositionAreUniform) {
  std::vector<double> areas, aspects, places;
  for (std::uint64_t i = 0; i < 20000; ++i) {
    SampleRng random(1, 0, i);
    const jpeg::Box box = random_crop(1000, 1000, random, {.min_area = 0.08, .max_area = 0.5});
    EXPECT_GE(box.left, 0);
    EXPECT_LE(box.left + box.width, 1000);
    EXPECT_GE(box.top, 0);
    EXPECT_LE(box.top + box.height, 1000);
    areas.push_back(box.width * box.height / 1e6);
    aspects.push_back(std::log(static_cast<double>(box.width) / box.height));
    places.push_back(static_cast<double>(box.left) / (1000 - box.width));
    places.push_back(static_cast<double>(box.top) / (1000 - box.height));
  }
  expect_mean(areas, 0.29, 0.42 / std::sqrt(12.0));
  expect_mean(aspects, 0, 2 * std::log(4.0 / 3) / std::sqrt(12.0));
  expect_mean(places, 0.5, 1 / std::sqrt(12.0));
  EXPECT_LT(*std::max_element(areas.begin(), areas.end()), 0.502);
  EXPECT_GT(*std::min_element(areas.begin(), areas.end()), 0.078);
}

/// 20 x 1000: no box with these aspect ratios has 8 % of its area.
TEST(RandomCrop, FallsBackToCenterCrop) {
  SampleRng random(1, 2, 3);
  EXPECT_EQ(random_crop(20, 1000, random), (jpeg::Box{0, 486, 20, 27}));
  EXPECT_EQ(random_crop(1000, 20, random), (jpeg::Box{486, 0, 27, 20}));
  EXPECT_EQ(random_crop(1, 1, random), (jpeg::Box{0, 0, 1, 1}));
}

TEST(CenterCrop, MatchesTorchvision) {
  EXPECT_EQ(resized_size(500, 375, 256), (std::pair<std::int64_t, std::int64_t>(341, 256)));
  EXPECT_EQ(resized_size(375, 500, 256), (std::pair<std::int64_t, std::int64_t>(256, 341)));
  EXPECT_EQ(resized_size(1, 65535, 256), (std::pair<std::int64_t, std::int64_t>(256, 16776960)));
  EXPECT_EQ(center_crop(341, 256, 224), (jpeg::Box{58, 16, 224, 224}));  // round(58.5) rounds to the even number
  EXPECT_EQ(center_crop(343, 256, 224), (jpeg::Box{60, 16, 224, 224}));  // round(59.5)
}

TEST(CenterCrop, ShrinkFactorKeepsMinimumSize) {
  EXPECT_EQ(shrink_factor({0, 0, 447, 900}, 224), 1);
  EXPECT_EQ(shrink_factor({0, 0, 448, 900}, 224), 2);
  EXPECT_EQ(shrink_factor({0, 0, 2000, 900}, 224), 4);
  EXPECT_EQ(shrink_factor({0, 0, 1792, 1792}, 224), 8);
  EXPECT_EQ(shrink_factor({0, 0, 9000, 9000}, 224), 8);
}

TEST(ImageFolder, ListsClassesAndFilesInOrder) {
  const TempDir folder;
  for (const char* const name :
       {"b/2.jpg", "b/10.JPEG", "b/deep/er/1.jpeg", "b/deep-er/1.Jpg", "a/x.jpg", "a/notes.txt", "C/y.jpg", "root.jpg"})
    folder.write(name, "");
  std::filesystem::create_directory_symlink(folder / "a", folder / "d");
  const ImageFolder images(folder.path());
  EXPECT_THAT(images.classes(), ElementsAre("C", "a", "b", "d"));
  std::vector<std::string> files;
  for (std::size_t i = 0; i < images.size(); ++i)
    files.push_back(std::to_string(images.label(i)) + images.path(i).substr(folder.path().size()));
  // The order of os.walk() and sorted(): a directory's own files first, then those of each subdirectory.
  EXPECT_THAT(files, ElementsAre("0/C/y.jpg", "1/a/x.jpg", "2/b/10.JPEG", "2/b/2.jpg", "2/b/deep-er/1.Jpg",
                                 "2/b/deep/er/1.jpeg", "3/d/x.jpg"));
}

TEST(ImageFolder, ReportsWhatIsMissing) {
  const TempDir folder;
  const auto message = [&](const std::string& path) { return message_of<UsageError>([&] { ImageFolder{path}; }); };
  EXPECT_EQ(message(folder / "nowhere"), "ImageFolder: the directory " + (folder / "nowhere") + " does not exist");
  folder.write("images/x.jpg", "");
  EXPECT_THAT(message(folder / "images"), EndsWith("/images has no subdirectories; expected one per class"));
  folder.write("some/cat/x.jpg", "");
  folder.write("some/dog/x.png", "");
  EXPECT_EQ(message(folder / "some"), "ImageFolder: the directory " + (folder / "some/dog") +
                                          " has no image; expected files that end in .jpg or .jpeg");
  std::filesystem::create_directory_symlink(folder / "some/cat", folder / "some/cat/again");
  EXPECT_THAT(message(folder / "some"), HasSubstr("is more than 32 levels deep"));
}

TEST(ImageFolder, WarnsAboutOtherImageFormats) {
  const TempDir folder;
  for (const char* const name : {"a/1.jpg", "a/2.png", "b/1.jpg", "b/2.WEBP"}) folder.write(name, "");
  testing::internal::CaptureStderr();
  EXPECT_EQ(ImageFolder(folder.path()).size(), 2u);
  EXPECT_THAT(
      testing::internal::GetCapturedStderr(),
      EndsWith(": 2 images that do not end in .jpg or .jpeg are skipped; the first is " + (folder / "a/2.png") + "\n"));
}

}  // namespace
}  // namespace lockstep::data
