// Generative models: adversarial networks with two optimizers, penalties on gradients, and autoencoders.
#include "tests/training/programs/program.h"

namespace lockstep::tests::programs::generative {
namespace {

constexpr std::int64_t kNoise = 8;

torch::nn::ConvTranspose2d up(int in, int out, int stride, int padding) {
  return torch::nn::ConvTranspose2d(
      torch::nn::ConvTranspose2dOptions(in, out, 4).stride(stride).padding(padding).bias(false));
}

torch::nn::Conv2d down(int in, int out) {
  return torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, 4).stride(2).padding(1).bias(false));
}

// DCGAN as in pytorch/examples/cpp/dcgan, on images of 8 x 8.

struct GeneratorImpl : torch::nn::Module {
  GeneratorImpl() : conv1(up(kNoise, 8, 1, 0)), norm1(8), conv2(up(8, 1, 2, 1)) {
    register_module("conv1", conv1);
    register_module("conv2", conv2);
    register_module("norm1", norm1);
  }
  torch::Tensor forward(torch::Tensor x) {
    x = torch::relu(norm1(conv1(x)));
    return torch::tanh(conv2(x));
  }
  torch::nn::ConvTranspose2d conv1;
  torch::nn::BatchNorm2d norm1;
  torch::nn::ConvTranspose2d conv2;
};
TORCH_MODULE(Generator);

torch::nn::Sequential make_discriminator() {
  return torch::nn::Sequential(down(1, 6), torch::nn::LeakyReLU(torch::nn::LeakyReLUOptions().negative_slope(0.2)),
                               down(6, 8), torch::nn::BatchNorm2d(8),
                               torch::nn::LeakyReLU(torch::nn::LeakyReLUOptions().negative_slope(0.2)),
                               torch::nn::Conv2d(torch::nn::Conv2dOptions(8, 1, 2).bias(false)), torch::nn::Sigmoid());
}

torch::Tensor real_images(const Run& run, int step) {
  return run.part(torch::tanh(normal(step, {kGlobalBatch, 1, 8, 8}) + 0.5));
}

torch::Tensor noise(const Run& run, int step) { return run.part(normal(500 + step, {kGlobalBatch, kNoise, 1, 1})); }

void dcgan(Run& run) {
  auto generator = make_module<Generator>(run);
  auto discriminator = make_discriminator();
  discriminator->to(torch::kFloat64);
  convert_sync_batch_norm(generator, run.world);
  convert_sync_batch_norm(discriminator, run.world);
  DistributedDataParallel generator_ddp(generator, run.world);
  DistributedDataParallel discriminator_ddp(discriminator, run.world);
  const auto generator_optimizer = make_adam(run, generator_ddp, generator->parameters(), 2e-3, {0.5, 0.999});
  const auto discriminator_optimizer =
      make_adam(run, discriminator_ddp, discriminator->parameters(), 2e-3, {0.5, 0.999});
  for (int step = 0; step < kSteps; ++step) {
    // Train the discriminator with real images, then with generated ones.
    discriminator->zero_grad();
    const torch::Tensor real_output = discriminator->forward(real_images(run, step)).view({-1});
    const torch::Tensor real_labels = run.part(uniform(step, {kGlobalBatch}) * 0.2 + 0.8);
    const torch::Tensor loss_of_real = torch::binary_cross_entropy(real_output, real_labels);
    loss_of_real.backward();
    const torch::Tensor images = generator->forward(noise(run, step));
    const torch::Tensor output = discriminator->forward(images.detach()).view({-1});
    const torch::Tensor loss_of_generated = torch::binary_cross_entropy(output, torch::zeros_like(output));
    loss_of_generated.backward();
    discriminator_optimizer->step();
    // Train the generator. This also reaches the parameters of the discriminator.
    generator->zero_grad();
    const torch::Tensor judged = discriminator->forward(images).view({-1});
    const torch::Tensor generator_loss = torch::binary_cross_entropy(judged, torch::ones_like(judged));
    generator_loss.backward();
    generator_optimizer->step();
    run.add_loss(loss_of_real + loss_of_generated, "discriminator_loss");
    run.add_loss(generator_loss, "generator_loss");
  }
  run.add("generator", *generator);
  run.add("discriminator", *discriminator);
}

// WGAN-GP: the gradient of the critic with respect to its input is part of the loss (double backward).

torch::nn::Sequential make_critic() {
  return torch::nn::Sequential(torch::nn::Flatten(), torch::nn::Linear(64, 16), torch::nn::Tanh(),
                               torch::nn::Linear(16, 16), torch::nn::Softplus(), torch::nn::Linear(16, 1));
}

torch::nn::Sequential make_simple_generator() {
  return torch::nn::Sequential(torch::nn::Flatten(), torch::nn::Linear(kNoise, 16), torch::nn::GELU(),
                               torch::nn::Linear(16, 64), torch::nn::Tanh());
}

torch::Tensor gradient_penalty(torch::nn::Sequential& critic, const torch::Tensor& real, const torch::Tensor& generated,
                               const torch::Tensor& mix) {
  const torch::Tensor between = (mix * real + (1 - mix) * generated).requires_grad_();
  const torch::Tensor scores = critic->forward(between);
  const torch::Tensor gradient =
      torch::autograd::grad({scores}, {between}, {torch::ones_like(scores)}, /*retain_graph=*/true,
                            /*create_graph=*/true)[0];
  return (gradient.flatten(1).norm(2, 1) - 1).pow(2).mean();
}

void wgan_gp(Run& run) {
  torch::manual_seed(static_cast<std::uint64_t>(1 + run.world.rank()));
  auto generator = make_simple_generator();
  auto critic = make_critic();
  generator->to(torch::kFloat64);
  critic->to(torch::kFloat64);
  DistributedDataParallel critic_ddp(critic, run.world), generator_ddp(generator, run.world);
  const auto critic_optimizer = make_adam(run, critic_ddp, critic->parameters(), 5e-3, {0, 0.9});
  const auto generator_optimizer = make_adam(run, generator_ddp, generator->parameters(), 5e-3, {0, 0.9});
  for (int step = 0; step < kSteps; ++step) {
    const torch::Tensor real = real_images(run, step);
    torch::Tensor generated;
    {
      const torch::NoGradGuard no_grad;
      generated = generator->forward(noise(run, step)).view_as(real);
    }
    critic_optimizer->zero_grad();
    const torch::Tensor mix = run.part(uniform(step, {kGlobalBatch, 1, 1, 1}));
    const torch::Tensor loss = critic->forward(generated).mean() - critic->forward(real).mean() +
                               10 * gradient_penalty(critic, real, generated, mix);
    loss.backward();
    critic_optimizer->step();
    run.add_loss(loss, "critic_loss");
    if (step % 3 == 2) {  // the generator is trained less often, and the critic is frozen meanwhile
      for (torch::Tensor& parameter : critic->parameters()) parameter.requires_grad_(false);
      generator_optimizer->zero_grad();
      const torch::Tensor generator_loss = -critic->forward(generator->forward(noise(run, 100 + step))).mean();
      generator_loss.backward();
      generator_optimizer->step();
      for (torch::Tensor& parameter : critic->parameters()) parameter.requires_grad_(true);
      run.add_loss(generator_loss, "generator_loss");
    }
  }
  run.add("generator", *generator);
  run.add("critic", *critic);
}

// The R1 penalty, added in a backward pass of its own in every second step, as in StyleGAN2.
void r1_penalty(Run& run) {
  torch::manual_seed(static_cast<std::uint64_t>(1 + run.world.rank()));
  torch::nn::Sequential critic(torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 4, 3).padding(1)), torch::nn::SiLU(),
                               torch::nn::AvgPool2d(2), torch::nn::Flatten(), torch::nn::Linear(64, 1));
  critic->to(torch::kFloat64);
  DistributedDataParallel ddp(critic, run.world);
  const auto optimizer = make_adam(run, ddp, critic->parameters(), 5e-3);
  for (int step = 0; step < kSteps; ++step) {
    optimizer->zero_grad();
    const torch::Tensor real = real_images(run, step), other = run.part(normal(800 + step, {kGlobalBatch, 1, 8, 8}));
    const torch::Tensor loss =
        torch::softplus(-critic->forward(real)).mean() + torch::softplus(critic->forward(other)).mean();
    loss.backward();
    run.add_loss(loss);
    if (step % 2 == 0) {
      const torch::Tensor input = real.detach().clone().requires_grad_();
      const torch::Tensor gradient = torch::autograd::grad({critic->forward(input).sum()}, {input}, {},
                                                           /*retain_graph=*/true, /*create_graph=*/true)[0];
      const torch::Tensor penalty = 5 * gradient.pow(2).flatten(1).sum(1).mean();
      penalty.backward();
      run.add_loss(penalty, "penalty");
    }
    optimizer->step();
  }
  run.add("critic", *critic);
}

// A variational autoencoder as in pytorch/examples.

struct AutoencoderImpl : torch::nn::Module {
  torch::Tensor encode(const torch::Tensor& x) { return torch::relu(input(x)); }
  torch::Tensor decode(const torch::Tensor& z) { return torch::sigmoid(output(torch::relu(hidden(z)))); }
  torch::nn::Linear input = register_module("input", torch::nn::Linear(20, 16));
  torch::nn::Linear mean = register_module("mean", torch::nn::Linear(16, 3));
  torch::nn::Linear log_variance = register_module("log_variance", torch::nn::Linear(16, 3));
  torch::nn::Linear hidden = register_module("hidden", torch::nn::Linear(3, 16));
  torch::nn::Linear output = register_module("output", torch::nn::Linear(16, 20));
};
TORCH_MODULE(Autoencoder);

void vae(Run& run) {
  auto net = make_module<Autoencoder>(run);
  DistributedDataParallel ddp(net, run.world, {.bucket_bytes = {}});
  const auto optimizer = make_adam(run, ddp, net->parameters(), 0.01);
  for (int step = 0; step < kSteps; ++step) {
    const torch::Tensor x = run.part(uniform(step, {kGlobalBatch, 20}));
    const torch::Tensor noise = run.part(normal(step, {kGlobalBatch, 3}));
    optimizer->zero_grad();
    const torch::Tensor code = net->encode(x);
    const torch::Tensor mean = net->mean(code), log_variance = net->log_variance(code);
    const torch::Tensor restored = net->decode(mean + noise * torch::exp(0.5 * log_variance));
    const torch::Tensor divergence = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum();
    const torch::Tensor loss =
        (torch::binary_cross_entropy(restored, x, {}, at::Reduction::Sum) + divergence) / x.size(0);
    loss.backward();
    optimizer->step();
    run.add_loss(loss);
  }
  run.add("net", *net);
}

}  // namespace
}  // namespace lockstep::tests::programs::generative

namespace lockstep::tests::programs {

std::vector<Program> generative_programs() {
  std::vector<Program> programs;
  const auto add = [&](const std::vector<Program>& more) { programs.insert(programs.end(), more.begin(), more.end()); };
  add(with_both_optimizers("dcgan", generative::dcgan));
  add(with_all_optimizers("wgan_gp", generative::wgan_gp));
  add(with_both_optimizers("r1_penalty", generative::r1_penalty));
  add(with_both_optimizers("vae", generative::vae));
  return programs;
}

}  // namespace lockstep::tests::programs
