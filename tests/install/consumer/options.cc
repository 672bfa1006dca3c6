// Options as users write them: each sets one member by name. With -Wextra, g++ warns about every other member that has
// no initializer.
#include <lockstep/cuda/graphed_step.h>
#include <lockstep/data/datasets/char_dataset.h>
#include <lockstep/data/datasets/corpus.h>
#include <lockstep/data/datasets/image_dataset.h>
#include <lockstep/lockstep.h>
#include <lockstep/train/loggers/logger_collection.h>
#include <lockstep/train/report/progress_bar.h>
#include <lockstep/train/report/rank_record.h>
#include <lockstep/train/report/throughput.h>
#include <torch/torch.h>

#include <tuple>

auto make_options() {
  using namespace lockstep;
  return std::tuple(
      amp::AutocastOptions{.cache = false}, amp::GradScalerOptions{.growth_interval = 100},
      amp::Precision{.batch_norm_fp32 = false}, amp::PrecisionOverrides{.master_weights = true},
      checkpoint::CheckpointOptions{.keep = 3}, checkpoint::LoadOptions{.strict = false},
      checkpoint::ReadOptions{.verify = false}, checkpoint::SaveOptions{.metadata = {{"epoch", "1"}}},
      comm::CallOptions{.name = "loss"}, comm::InitOptions{.address = "alpha:29500"},
      cuda::GraphedStepOptions{.warmup = 2}, data::CharOptions{.stride = 8}, data::CorpusOptions{.max_bytes = 1000},
      data::CropOptions{.max_area = 0.5}, data::ImageOptions{.augment = false}, data::LoaderOptions{.seed = 1},
      data::SamplerOptions{.shuffle = false}, ddp::DdpOptions{.overlap = false},
      ddp::JoinOptions{.divide_by_initial_world_size = false}, launcher::LaunchOptions{.ranks = 2},
      nn::DataParallelOptions{.dim = 1}, optim::AdagradOptions{.lr = 0.1}, optim::AdamOptions{.eps = 1e-6},
      optim::AdamWOptions{.amsgrad = true}, optim::EmaOptions{.buffers = true}, optim::FusedOptions{.foreach = true},
      optim::LAMBOptions{.eps = 1e-6}, optim::LARSOptions{.momentum = 0.9}, optim::SGDOptions{.momentum = 0.9},
      optim::CosineDecayOptions{.min_lr = 0.1}, optim::LinearOptions{.steps = 5},
      optim::MultiStepDecayOptions{.factor = 0.1}, optim::OneCycleOptions{.steps = 5},
      optim::PolynomialDecayOptions{.power = 2}, optim::ReduceLROnPlateauOptions{.patience = 3},
      optim::StepDecayOptions{.factor = 0.1}, training::EarlyStoppingOptions{.patience = 3},
      training::LoggerOptions{.directory = "logs"}, training::ModelCheckpointOptions{.top_k = 2},
      training::ProgressBarOptions{.num_epochs = 2}, training::RankRecorderOptions{.rank = 1},
      training::ResumeOptions{.train_on = true}, training::SaveStateOptions{.finished = true},
      training::ThroughputOptions{.peak_flops = 1e12}, training::TrainerOptions{.max_epochs = 5},
      training::TrainingStateOptions{.keep = 3});
}
