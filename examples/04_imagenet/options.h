// The command line of 04_imagenet.
#pragma once

#include <lockstep/lockstep.h>

#include <cstdint>
#include <string>

#include "examples/04_imagenet/resnet.h"
#include "examples/arguments.h"

struct Options {
  std::string data;
  std::string arch = "resnet50";
  std::int64_t epochs = 90;
  std::int64_t batch = 32;
  std::int64_t workers = 4;
  std::int64_t image_size = 224;
  double lr = 0.1;
  double momentum = 0.9;
  double weight_decay = 1e-4;
  double warmup = 5;
  double label_smoothing = 0.1;
  std::string precision = "32";
  bool sync_bn = false;
  bool skip_broken = false;
  std::int64_t seed = 1;
  std::string weights;
  std::string save;
  std::string loss_log;
};

inline Options read_options(int argc, char** argv) {
  Options options;
  examples::Arguments arguments("Trains a residual network on folders of JPEG images.");
  arguments.text("--data", options.data, "directory with train/CLASS/*.jpg and val/CLASS/*.jpg");
  arguments.text("--arch", options.arch, "resnet18, resnet34 or resnet50");
  arguments.integer("--epochs", options.epochs, 0, 10000,
                    "passes over the training images; 0: only evaluate the weights");
  arguments.integer("--batch", options.batch, 1, 65536, "images per step and rank");
  arguments.integer("--workers", options.workers, 0, 256,
                    "threads per rank that read images; 0: read in the training thread");
  arguments.integer("--image-size", options.image_size, 32, 1024, "side length of the network's input");
  arguments.number("--lr", options.lr, 1e-6, 1000, "maximum learning rate");
  arguments.number("--momentum", options.momentum, 0, 0.9999, "momentum of SGD");
  arguments.number("--weight-decay", options.weight_decay, 0, 1,
                   "weight decay of all parameters except biases and batch norm");
  arguments.number("--warmup", options.warmup, 0, 1000, "epochs of linear warm-up to --lr, before cosine decay to 0");
  arguments.number("--label-smoothing", options.label_smoothing, 0, 0.999,
                   "fraction of the target that is spread over all classes");
  arguments.text("--precision", options.precision,
                 "32, bf16-mixed, fp16-mixed, bf16, fp16 or Apex's O0 to O3: precision of computation and weights");
  arguments.flag("--sync-bn", options.sync_bn, "use batch norm statistics over all ranks");
  arguments.flag("--skip-broken", options.skip_broken, "skip broken images with a warning instead of failing");
  arguments.integer("--seed", options.seed, 0, 1000000000,
                    "seed of the initial weights, the order of the images, crops and flips");
  arguments.text("--weights", options.weights,
                 "start with the weights in this file (safetensors, with torchvision's names)");
  arguments.text("--save", options.save, "write the weights to this file (safetensors) after each epoch");
  arguments.text("--loss-log", options.loss_log, "write the mean loss of each step to this file, one per line");
  arguments.parse(argc, argv);
  if (options.data.empty())
    throw lockstep::UsageError("--data is missing; expected a directory with train/CLASS/*.jpg and val/CLASS/*.jpg");
  if (!resnet::kArchs.contains(options.arch))
    throw lockstep::UsageError("--arch is \"" + options.arch + "\"; expected resnet18, resnet34 or resnet50");
  lockstep::amp::parse_precision(options.precision);
  return options;
}
