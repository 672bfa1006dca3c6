// A solver that owns main() and MPI, and trains a network while it runs: in each domain of ranks the solver computes
// how a field flows, and the first ranks of all domains train one network that predicts the result. The group that
// averages their gradients is made from the solver's own MPI_Comm. After `make build`, run it from the root of the
// repository:
//   mpirun -n 4 build/release/bin/07_mpi_solver --ranks-per-domain 2 --picture fields.png
#include <lockstep/lockstep.h>
#include <lockstep/train/metrics/tensor_conversion.h>
#include <mpi.h>
#include <torch/torch.h>

#include <cstdio>
#include <fstream>
#include <vector>

#include "examples/arguments.h"

namespace {

constexpr int kCells = 32;          // side of the field
constexpr std::int64_t kBatch = 8;  // problems per step and domain

/// A square periodic field in rows, of which each rank of the domain has some: u_t + u (u_x + u_y) = nu (u_xx + u_yy).
class Solver {
 public:
  explicit Solver(MPI_Comm domain) : domain_(domain) {
    MPI_Comm_rank(domain, &rank_);
    MPI_Comm_size(domain, &size_);
    rows_ = kCells / size_;
    field_.resize(static_cast<std::size_t>((rows_ + 2) * kCells));  // with a row of each neighbour
    next_ = field_;
  }
  int first_row() const { return rank_ * rows_; }
  int rows() const { return rows_; }
  float* row(int i) { return field_.data() + (i + 1) * kCells; }

  void advance(int time_steps) {
    const int up = (rank_ + size_ - 1) % size_, down = (rank_ + 1) % size_;
    for (int step = 0; step < time_steps; ++step) {
      MPI_Sendrecv(row(0), kCells, MPI_FLOAT, up, 0, row(rows_), kCells, MPI_FLOAT, down, 0, domain_,
                   MPI_STATUS_IGNORE);
      MPI_Sendrecv(row(rows_ - 1), kCells, MPI_FLOAT, down, 1, row(-1), kCells, MPI_FLOAT, up, 1, domain_,
                   MPI_STATUS_IGNORE);
      for (int i = 0; i < rows_; ++i) update_row(i);
      field_.swap(next_);
    }
  }
  /// Returns the whole field on the first rank of the domain, [kCells, kCells].
  torch::Tensor gather() {
    torch::Tensor whole = rank_ == 0 ? torch::empty({kCells, kCells}) : torch::Tensor();
    MPI_Gather(row(0), rows_ * kCells, MPI_FLOAT, rank_ == 0 ? whole.data_ptr<float>() : nullptr, rows_ * kCells,
               MPI_FLOAT, 0, domain_);
    return whole;
  }

 private:
  void update_row(int i) {
    constexpr float kTimeStep = 0.1F, kViscosity = 0.2F;
    const float *here = row(i), *above = row(i - 1), *below = row(i + 1);
    for (int j = 0; j < kCells; ++j) {
      const float u = here[j], left = here[(j + kCells - 1) % kCells], right = here[(j + 1) % kCells];
      const float slope = u > 0 ? 2 * u - left - above[j] : right + below[j] - 2 * u;  // upwind
      const float curvature = left + right + above[j] + below[j] - 4 * u;
      next_[static_cast<std::size_t>((i + 1) * kCells + j)] = u + kTimeStep * (kViscosity * curvature - u * slope);
    }
  }
  MPI_Comm domain_;
  int rank_ = 0, size_ = 1, rows_ = 0;
  std::vector<float> field_, next_;
};

/// A smooth random field; the same on all ranks of a domain, which pass the same seed.
torch::Tensor random_field(std::uint64_t seed) {
  auto generator = torch::make_generator<at::CPUGeneratorImpl>(seed);
  const torch::Tensor angle = torch::arange(kCells) * (2 * M_PI / kCells);
  torch::Tensor field = torch::zeros({kCells, kCells});
  for (int wave = 0; wave < 6; ++wave) {
    const torch::Tensor values = torch::rand({4}, generator);
    const torch::Tensor counts = torch::randint(-2, 3, {2}, generator);
    field += (values[0] - 0.5) *
             torch::sin(counts[0] * angle.unsqueeze(1) + counts[1] * angle + 2 * M_PI * values[1].item<double>());
  }
  return field;
}

// docs: begin group
/// Returns the group of the ranks of `comm`, in its order. All ranks of the job call it, each with its own
/// communicator, as after MPI_Comm_split().
lockstep::Group group_of(MPI_Comm comm, lockstep::Group& world) {
  int first = world.rank(), key = 0;
  MPI_Allreduce(MPI_IN_PLACE, &first, 1, MPI_INT, MPI_MIN, comm);  // names the communicator
  MPI_Comm_rank(comm, &key);
  return world.split(first, key);
}
// docs: end group

torch::nn::Sequential make_net() {
  torch::nn::Sequential net;
  for (const auto& [from, to] : {std::pair{1, 24}, {24, 24}, {24, 24}}) {
    net->push_back(torch::nn::Conv2d(torch::nn::Conv2dOptions(from, to, 5).padding(2).padding_mode(torch::kCircular)));
    net->push_back(torch::nn::GELU());
  }
  net->push_back(torch::nn::Conv2d(torch::nn::Conv2dOptions(24, 1, 5).padding(2).padding_mode(torch::kCircular)));
  return net;
}

/// Solves a batch of problems; returns the fields before and after, [2, kBatch, 1, kCells, kCells], on the domain's
/// first rank.
torch::Tensor solve(Solver& solver, std::uint64_t first_seed) {
  std::vector<torch::Tensor> before, after;
  for (std::int64_t i = 0; i < kBatch; ++i) {
    const torch::Tensor field = random_field(first_seed + static_cast<std::uint64_t>(i));
    std::copy_n(field[solver.first_row()].data_ptr<float>(), solver.rows() * kCells, solver.row(0));
    solver.advance(/*time_steps=*/25);
    before.push_back(field);
    after.push_back(solver.gather());
  }
  if (solver.first_row() != 0) return {};
  return torch::stack({torch::stack(before), torch::stack(after)}).unsqueeze(2);
}

/// Writes rows of three fields: before, after, predicted.
void write_picture(const std::string& path, const torch::Tensor& fields, const torch::Tensor& predicted) {
  std::vector<torch::Tensor> rows;
  for (std::int64_t i = 0; i < 3; ++i)
    rows.push_back(
        torch::constant_pad_nd(torch::cat({fields[0][i][0], fields[1][i][0], predicted[i][0]}, 1), {2, 2, 2, 2}));
  const torch::Tensor all = (torch::cat(rows) + 1.2).div(2.4).repeat_interleave(4, 0).repeat_interleave(4, 1);
  std::ofstream(path, std::ios::binary) << lockstep::training::encode_png(lockstep::training::make_image(all));
}

void solve_and_train(MPI_Comm domain, MPI_Comm learners, lockstep::Group& world, std::int64_t steps,
                     const std::string& picture) {
  lockstep::Group group = group_of(learners, world);
  Solver solver(domain);
  const bool learns = solver.first_row() == 0;
  lockstep::seed_everything(1);
  torch::nn::Sequential net = make_net();  // predicts the change
  std::optional<lockstep::DistributedDataParallel> ddp;
  std::optional<lockstep::optim::AdamW> optimizer;
  if (learns) {
    ddp.emplace(net, group);
    optimizer.emplace(*ddp, lockstep::optim::AdamWOptions{.lr = 2e-3});
  }
  for (std::int64_t step = 0; step < steps; ++step) {
    const auto problem = static_cast<std::uint64_t>((step * group.size() + group.rank()) * kBatch);
    const torch::Tensor fields = solve(solver, problem);  // all ranks of the domain
    if (!learns) continue;
    optimizer->zero_grad();
    const torch::Tensor loss = torch::mse_loss(fields[0] + net->forward(fields[0]), fields[1]);
    loss.backward();
    optimizer->step();
  }
  const torch::Tensor fields =
      solve(solver, (1ULL << 40) + static_cast<std::uint64_t>(kBatch * group.rank()));  // unseen
  if (!learns) return;
  const torch::NoGradGuard no_grad;
  const torch::Tensor predicted = fields[0] + net->forward(fields[0]);
  torch::Tensor errors = torch::stack({torch::mse_loss(predicted, fields[1]), torch::mse_loss(fields[0], fields[1])});
  group.all_reduce(errors);
  if (group.rank() != 0) return;
  std::printf("%d domains of %d ranks: the network's error is %.4f of that of an unchanged field\n", group.size(),
              world.size() / group.size(), (errors[0] / errors[1]).item<double>());
  if (!picture.empty()) write_picture(picture, fields, predicted);
}

void solve_in_domains(std::int64_t per_domain, std::int64_t steps, const std::string& picture) {
  int rank = 0, size = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (size % per_domain != 0 || kCells % per_domain != 0)
    throw lockstep::UsageError("--ranks-per-domain is \"" + std::to_string(per_domain) + "\"; expected a divisor of " +
                               std::to_string(size) + ", the number of ranks, and of " + std::to_string(kCells));
  MPI_Comm domain, learners;
  MPI_Comm_split(MPI_COMM_WORLD, rank / static_cast<int>(per_domain), rank, &domain);
  MPI_Comm_split(MPI_COMM_WORLD, rank % static_cast<int>(per_domain), rank, &learners);
  lockstep::Group world = lockstep::init();
  solve_and_train(domain, learners, world, steps, picture);
}

int run(int argc, char** argv) {
  std::int64_t per_domain = 1, steps = 300;
  std::string picture;
  examples::Arguments arguments("Solves flow problems with MPI, and trains a network that predicts the results.");
  arguments.integer("--ranks-per-domain", per_domain, 1, 64, "MPI ranks that solve a problem together");
  arguments.integer("--steps", steps, 1, 1000000, "updates of the network");
  arguments.text("--picture", picture, "write fields before, after and predicted to this PNG file");
  arguments.parse(argc, argv);
  int threads = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &threads);  // Lockstep calls MPI in other threads
  solve_in_domains(per_domain, steps, picture);
  MPI_Finalize();
  return 0;
}

}  // namespace

// After an exception the process exits without MPI_Finalize(), so that mpirun ends the other ranks.
int main(int argc, char** argv) { return lockstep::main(argc, argv, run); }
