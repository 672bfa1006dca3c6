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
  arguments.text("--data", options.data, "folder with train/CLASS/*.jpg and val/CLASS/*.jpg");
  arguments.text("--arch", options.arch, "resnet18, resnet34 or resnet50");
  arguments.integer("--epochs", options.epochs, 0, 10000,
                    "times through the training images; 0: the weights are evaluated");
  arguments.integer("--batch", options.batch, 1, 65536, "images in a step, of each rank");
  arguments.integer("--workers", options.workers, 0, 256,
                    "threads of each rank that read images; 0: none but the one that trains");
  arguments.integer("--image-size", options.image_size, 32, 1024, "sides of what the network sees");
  arguments.number("--lr", options.lr, 1e-6, 1000, "highest learning rate");
  arguments.number("--momentum", options.momentum, 0, 0.9999, "of SGD");
  arguments.number("--weight-decay", options.weight_decay, 0, 1,
                   "of all parameters but biases and those of batch norm");
  arguments.number("--warmup", options.warmup, 0, 1000,
                   "epochs in which the rate rises to --lr, before it falls along a cosine to 0");
  arguments.number("--label-smoothing", options.label_smoothing, 0, 0.999,
                   "part of the target that goes to all classes alike");
  arguments.text(
      "--precision", options.precision,
      "32, bf16-mixed, fp16-mixed, bf16, fp16 or Apex's O0 to O3: what is computed in, and what weights are kept in");
  arguments.flag("--sync-bn", options.sync_bn, "batch norm by the mean and variance of all ranks' images");
  arguments.flag("--skip-broken", options.skip_broken, "warn of a broken image and go on, instead of ending");
  arguments.integer("--seed", options.seed, 0, 1000000000,
                    "of the first weights, the order of the images, crops and flips");
  arguments.text("--weights", options.weights,
                 "begin with the weights of this file (safetensors, with torchvision's names)");
  arguments.text("--save", options.save, "write the weights to this file (safetensors), after each epoch");
  arguments.text("--loss-log", options.loss_log, "write the mean loss of each step to this file, a line each");
  arguments.read(argc, argv);
  if (options.data.empty())
    throw lockstep::UsageError("--data is missing; allowed is a folder with train/CLASS/*.jpg and val/CLASS/*.jpg");
  if (!resnet::kArchs.contains(options.arch))
    throw lockstep::UsageError("--arch is \"" + options.arch + "\"; allowed are resnet18, resnet34 and resnet50");
  lockstep::amp::parse_precision(options.precision);
  return options;
}
