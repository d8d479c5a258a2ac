// What ops need of TensorFlow, and its variables.

#ifndef SPARSEKIT_ENGINE_TENSORFLOW_H_
#define SPARSEKIT_ENGINE_TENSORFLOW_H_

#include <algorithm>
#include <vector>

#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace sparsekit {

using tensorflow::DEVICE_CPU;
using tensorflow::DT_BOOL;
using tensorflow::DT_FLOAT;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::errors::InvalidArgument;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

// The variables that are an op's first inputs, locked as long as this lives.
class Locked {
 public:
  absl::Status Lock(OpKernelContext* context, int count) {
    variables_.resize(count);
    for (int i = 0; i < count; ++i) {
      TF_RETURN_IF_ERROR(
          tensorflow::LookupResource(context, tensorflow::HandleFromInput(context, i), &variables_[i]));
    }
    for (const auto& variable : variables_) mutexes_.push_back(variable->mu());
    // Two ops that lock some of the same variables must do it in one order.
    std::sort(mutexes_.begin(), mutexes_.end());
    mutexes_.erase(std::unique(mutexes_.begin(), mutexes_.end()), mutexes_.end());
    for (tensorflow::mutex* mutex : mutexes_) mutex->lock();
    for (const auto& variable : variables_) {
      if (!variable->is_initialized) return InvalidArgument("a variable has no value yet");
    }
    return absl::OkStatus();
  }

  ~Locked() {
    if (mutexes_.empty()) return;
    for (tensorflow::mutex* mutex : mutexes_) mutex->unlock();
  }

  // What the variable holds; to be replaced where somebody else still holds the same tensor.
  Tensor* operator[](int i) { return variables_[i]->tensor(); }

 private:
  std::vector<tensorflow::core::RefCountPtr<tensorflow::Var>> variables_;
  std::vector<tensorflow::mutex*> mutexes_;
};

}  // namespace sparsekit

#endif  // SPARSEKIT_ENGINE_TENSORFLOW_H_
