// Hold masked positions at zero in one pass, in the memory where the values are.

#include <cstring>

#include "parallel.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace sparsekit {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::errors::InvalidArgument;

constexpr int64_t kBlock = 16384;  // elements of one piece of work
constexpr int64_t kLook = 1024;    // elements that are looked at before they are written

template <typename Work>
void InBlocks(OpKernelContext* context, int64_t size, const Work& work) {
  const int64_t blocks = (size + kBlock - 1) / kBlock;
  const int64_t workers = std::min(blocks, Workers(context, static_cast<double>(size)));
  Parallel(context, workers, [&](int64_t worker) {
    work(blocks * worker / workers * kBlock, std::min(size, blocks * (worker + 1) / workers * kBlock));
  });
}

// Bits are selected, not numbers multiplied: a masked NaN becomes +0 too. The compiler makes vectors of this loop.
void KeepOnly(const uint8_t* keep, const float* from, float* to, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    uint32_t bits;
    std::memcpy(&bits, from + i, sizeof bits);
    bits &= -static_cast<uint32_t>(keep[i] != 0);
    std::memcpy(to + i, &bits, sizeof bits);
  }
}

// The same, and positions that are zero (of either sign) are masked from now on.
void KeepOnlyAndDrop(uint8_t* keep, const float* from, float* to, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    uint32_t bits;
    std::memcpy(&bits, from + i, sizeof bits);
    const uint8_t kept = static_cast<uint8_t>((keep[i] != 0) & ((bits & 0x7fffffffu) != 0));
    keep[i] = kept;
    bits &= -static_cast<uint32_t>(kept);
    std::memcpy(to + i, &bits, sizeof bits);
  }
}

// Whether there is nothing to write: what is masked is +0 (and, for dropping, what is kept is not zero). After an update
// with masked gradients that is so nearly always, and reading alone costs half.
bool Holds(const uint8_t* keep, const float* values, int64_t begin, int64_t end, bool drop) {
  uint32_t wrong = 0;
  for (int64_t i = begin; i < end; ++i) {
    uint32_t bits;
    std::memcpy(&bits, values + i, sizeof bits);
    const uint32_t kept = -static_cast<uint32_t>(keep[i] != 0);
    wrong |= bits & ~kept;
    if (drop) wrong |= kept & -static_cast<uint32_t>((bits & 0x7fffffffu) == 0);
  }
  return wrong == 0;
}

const uint8_t* Bytes(const Tensor& tensor) { return static_cast<const uint8_t*>(tensor.data()); }

// A tensor with masked positions at zero; written over its input where nobody else reads that.
class KeepOnlyOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    // No copy of the input is held here: it would count as a reader.
    const tensorflow::TensorShape shape = context->input(0).shape();
    const float* from = Floats(context->input(0));
    const Tensor& keep = context->input(1);
    OP_REQUIRES(context, keep.shape() == shape,
                InvalidArgument("keep has shape ", keep.shape().DebugString(), ", the value ", shape.DebugString()));
    Tensor* out = nullptr;
    OP_REQUIRES_OK(context, context->forward_input_or_allocate_output({0}, 0, shape, &out));
    float* to = Floats(out);
    InBlocks(context, shape.num_elements(),
             [&](int64_t begin, int64_t end) { KeepOnly(Bytes(keep), from, to, begin, end); });
  }
};

// A variable, in its own memory unless somebody still holds a value that was read from it.
class HoldOp : public OpKernel {
 public:
  explicit HoldOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("drop", &drop_));
  }

  void Compute(OpKernelContext* context) override {
    tensorflow::core::RefCountPtr<tensorflow::Var> variable;
    tensorflow::core::RefCountPtr<tensorflow::Var> mask;
    OP_REQUIRES_OK(context, tensorflow::LookupResource(context, tensorflow::HandleFromInput(context, 0), &variable));
    OP_REQUIRES_OK(context, tensorflow::LookupResource(context, tensorflow::HandleFromInput(context, 1), &mask));
    tensorflow::mutex_lock lock(*variable->mu());
    tensorflow::mutex_lock mask_lock(*mask->mu());
    Tensor* weight = variable->tensor();
    Tensor* keep = mask->tensor();
    OP_REQUIRES(context,
                variable->is_initialized && mask->is_initialized && weight->dtype() == tensorflow::DT_FLOAT &&
                    keep->dtype() == tensorflow::DT_BOOL && keep->shape() == weight->shape(),
                InvalidArgument("hold needs a float32 variable and a bool variable of its shape"));
    Tensor fresh_weight;
    Tensor fresh_keep;
    Tensor* held = weight;
    Tensor* kept = keep;
    if (!weight->RefCountIsOne()) {
      OP_REQUIRES_OK(context, context->allocate_temp(weight->dtype(), weight->shape(), &fresh_weight));
      held = &fresh_weight;
    }
    if (drop_ && !keep->RefCountIsOne()) {
      OP_REQUIRES_OK(context, context->allocate_temp(keep->dtype(), keep->shape(), &fresh_keep));
      std::memcpy(fresh_keep.data(), keep->data(), keep->NumElements());
      kept = &fresh_keep;
    }
    const float* from = Floats(*weight);
    float* to = Floats(held);
    uint8_t* bytes = static_cast<uint8_t*>(kept->data());
    InBlocks(context, weight->NumElements(), [&](int64_t begin, int64_t end) {
      for (int64_t at = begin; at < end; at += kLook) {
        const int64_t stop = std::min(end, at + kLook);
        if (from == to && Holds(bytes, from, at, stop, drop_)) continue;
        if (drop_) {
          KeepOnlyAndDrop(bytes, from, to, at, stop);
        } else {
          KeepOnly(bytes, from, to, at, stop);
        }
      }
    });
    if (held != weight) *weight = fresh_weight;
    if (kept != keep) *keep = fresh_keep;
  }

 private:
  bool drop_;
};

REGISTER_OP("SparsekitKeepOnly")
    .Input("value: float")
    .Input("keep: bool")
    .Output("kept: float")
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      c->set_output(0, c->input(0));
      return absl::OkStatus();
    });
REGISTER_KERNEL_BUILDER(Name("SparsekitKeepOnly").Device(tensorflow::DEVICE_CPU), KeepOnlyOp);

REGISTER_OP("SparsekitHold")
    .Input("weight: resource")
    .Input("keep: resource")
    .Attr("drop: bool")
    .SetIsStateful()
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext*) { return absl::OkStatus(); });
REGISTER_KERNEL_BUILDER(Name("SparsekitHold").Device(tensorflow::DEVICE_CPU), HoldOp);

}  // namespace
}  // namespace sparsekit
