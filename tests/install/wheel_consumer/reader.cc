// reader FOLDER: reads compressed MNIST files in FOLDER, and asks whether JPEG images can be read.
#include <lockstep/data/datasets/mnist.h>
#include <lockstep/data/jpeg/jpeg.h>

#include <iostream>

int main(int, char** argv) {
  const auto images = lockstep::data::Mnist::load(argv[1], lockstep::data::Mnist::Mode::kTest);
  std::cout << images.size() << " images; JPEG: " << lockstep::data::jpeg::jpeg_unavailable_reason() << std::endl;
}
