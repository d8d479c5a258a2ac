// Custom TensorFlow CPU ops for kernels whose zeros are known.

#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/platform/threadpool.h"

namespace sparsekit {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

// Values of a dense tensor at given flat positions.
class GatherValuesOp : public OpKernel {
 public:
  explicit GatherValuesOp(OpKernelConstruction* context) : OpKernel(context) {}

  void Compute(OpKernelContext* context) override {
    const Tensor& dense = context->input(0);
    const Tensor& positions = context->input(1);
    OP_REQUIRES(context, positions.dims() == 1,
                tensorflow::errors::InvalidArgument("positions must be a vector, got shape ",
                                                    positions.shape().DebugString()));
    Tensor* values = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, positions.shape(), &values));
    const float* from = static_cast<const float*>(dense.data());
    const int32_t* at = static_cast<const int32_t*>(positions.data());
    float* to = static_cast<float*>(values->data());
    const uint64_t size = dense.NumElements();
    for (int64_t k = 0; k < positions.NumElements(); ++k) {
      const uint64_t position = static_cast<uint32_t>(at[k]);
      OP_REQUIRES(context, position < size,
                  tensorflow::errors::InvalidArgument("position ", at[k], " is outside a tensor of ", size));
      to[k] = from[position];
    }
  }
};

REGISTER_OP("SparsekitGatherValues")
    .Input("dense: float")
    .Input("positions: int32")
    .Output("values: float")
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      c->set_output(0, c->input(1));
      return absl::OkStatus();
    });
REGISTER_KERNEL_BUILDER(Name("SparsekitGatherValues").Device(tensorflow::DEVICE_CPU), GatherValuesOp);

}  // namespace
}  // namespace sparsekit
