// Index arrays of a mask, and the ways between a dense kernel and the vector of its kept values.

#include <atomic>
#include <limits>
#include <vector>

#include "bits.h"
#include "parallel.h"
#include "tensorflow.h"

namespace sparsekit {
namespace {

class StructureOp : public OpKernel {
 public:
  explicit StructureOp(OpKernelConstruction* context) : OpKernel(context) {}

  void Compute(OpKernelContext* context) override {
    const Tensor& keep = context->input(0);
    OP_REQUIRES(context, keep.dims() == 2,
                InvalidArgument("keep must be (in, out), got shape ", keep.shape().DebugString()));
    const int64_t inputs = keep.dim_size(0);
    const int64_t outputs = keep.dim_size(1);
    OP_REQUIRES(context, outputs < std::numeric_limits<int32_t>::max() && inputs < std::numeric_limits<int32_t>::max(),
                InvalidArgument("a mask of shape ", keep.shape().DebugString(), " needs more than 32 bits an index"));
    const uint8_t* bits = static_cast<const uint8_t*>(keep.data());
    const int64_t parts = Workers(context, static_cast<double>(keep.NumElements()));

    Tensor* row_pointers = nullptr;
    Tensor* column_pointers = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({inputs + 1}), &row_pointers));
    OP_REQUIRES_OK(context, context->allocate_output(2, TensorShape({outputs + 1}), &column_pointers));
    int32_t* row_at = Ints(row_pointers);
    std::vector<int64_t> counts(inputs);
    Parallel(context, parts, [&](int64_t part) {
      for (int64_t i = inputs * part / parts; i < inputs * (part + 1) / parts; ++i) {
        counts[i] = CountSet(bits, i * outputs, (i + 1) * outputs);
      }
    });
    int64_t kept = 0;
    row_at[0] = 0;
    for (int64_t i = 0; i < inputs; ++i) {
      kept += counts[i];
      OP_REQUIRES(context, kept < std::numeric_limits<int32_t>::max(),
                  InvalidArgument("a mask may keep 2^31 - 2 weights at most"));
      row_at[i + 1] = static_cast<int32_t>(kept);
    }

    Tensor* columns = nullptr;
    Tensor* rows = nullptr;
    Tensor* permutation = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(1, TensorShape({kept}), &columns));
    OP_REQUIRES_OK(context, context->allocate_output(3, TensorShape({kept}), &rows));
    OP_REQUIRES_OK(context, context->allocate_output(4, TensorShape({kept}), &permutation));
    int32_t* column_of = Ints(columns);
    Parallel(context, parts, [&](int64_t part) {
      for (int64_t i = inputs * part / parts; i < inputs * (part + 1) / parts; ++i) {
        int32_t* to = column_of + row_at[i];
        ForEachSet(bits + i * outputs, 0, outputs, [&](int64_t o) { *to++ = static_cast<int32_t>(o); });
      }
    });

    // Each part owns a range of columns, so that no two threads write to one place.
    std::vector<int32_t> next(outputs, 0);
    const auto walk = [&](int64_t part, const auto& visit) {
      const int64_t begin = outputs * part / parts;
      const int64_t end = outputs * (part + 1) / parts;
      for (int64_t i = 0; i < inputs; ++i) {
        const int32_t* stop = column_of + row_at[i + 1];
        for (const int32_t* at = std::lower_bound(column_of + row_at[i], const_cast<int32_t*>(stop), begin);
             at < stop && *at < end; ++at) {
          visit(i, *at, static_cast<int32_t>(at - column_of));
        }
      }
    };
    Parallel(context, parts, [&](int64_t part) {
      walk(part, [&](int64_t, int32_t column, int32_t) { ++next[column]; });
    });
    int32_t* column_at = Ints(column_pointers);
    column_at[0] = 0;
    for (int64_t o = 0; o < outputs; ++o) {
      column_at[o + 1] = column_at[o] + next[o];
      next[o] = column_at[o];
    }
    int32_t* row_of = Ints(rows);
    int32_t* place = Ints(permutation);
    Parallel(context, parts, [&](int64_t part) {
      walk(part, [&](int64_t row, int32_t column, int32_t position) {
        const int32_t k = next[column]++;
        row_of[k] = static_cast<int32_t>(row);
        place[k] = position;
      });
    });
  }
};

// Calls work(row, first, last) for each row's segment, on all threads; false if a column is not below `outputs`.
template <typename Work>
bool ForEachRow(OpKernelContext* context, const Tensor& pointers, const Tensor& columns, int64_t outputs, double cycles,
                const Work& work) {
  const int64_t inputs = pointers.NumElements() - 1;
  const int32_t* at = Ints(pointers);
  const int64_t parts = Workers(context, cycles);
  std::atomic<bool> bad{false};
  Parallel(context, parts, [&](int64_t part) {
    const int64_t begin = Boundary(at, inputs, part, parts, 1, 8);
    const int64_t end = Boundary(at, inputs, part + 1, parts, 1, 8);
    if (!AllBelow(Ints(columns) + at[begin], at[end] - at[begin], outputs)) {
      bad = true;
      return;
    }
    for (int64_t i = begin; i < end; ++i) work(i, at[i], at[i + 1]);
  });
  return !bad;
}

class GatherOp : public OpKernel {
 public:
  explicit GatherOp(OpKernelConstruction* context) : OpKernel(context) {}

  void Compute(OpKernelContext* context) override {
    const Tensor& dense = context->input(0);
    const Tensor& pointers = context->input(1);
    const Tensor& columns = context->input(2);
    OP_REQUIRES(context, dense.dims() == 2,
                InvalidArgument("dense must be (in, out), got shape ", dense.shape().DebugString()));
    OP_REQUIRES_OK(context, CheckVector("columns", columns, columns.NumElements()));
    OP_REQUIRES_OK(context, CheckPointers("row_pointers", pointers, columns.NumElements()));
    OP_REQUIRES_OK(context, CheckVector("row_pointers", pointers, dense.dim_size(0) + 1));
    const int64_t outputs = dense.dim_size(1);
    Tensor* values = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, columns.shape(), &values));
    const bool good = ForEachRow(context, pointers, columns, outputs, 4.0 * columns.NumElements(),
                                 [&](int64_t row, int32_t first, int32_t last) {
                                   const float* from = Floats(dense) + row * outputs;
                                   for (int32_t k = first; k < last; ++k) {
                                     Floats(values)[k] = from[Ints(columns)[k]];
                                   }
                                 });
    OP_REQUIRES(context, good, InvalidArgument("columns must lie below ", outputs));
  }
};

class ScatterOp : public OpKernel {
 public:
  explicit ScatterOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("outputs", &outputs_));
  }

  void Compute(OpKernelContext* context) override {
    const Tensor& values = context->input(0);
    const Tensor& pointers = context->input(1);
    const Tensor& columns = context->input(2);
    OP_REQUIRES_OK(context, CheckVector("values", values, columns.NumElements()));
    OP_REQUIRES_OK(context, CheckVector("columns", columns, values.NumElements()));
    OP_REQUIRES_OK(context, CheckPointers("row_pointers", pointers, values.NumElements()));
    Tensor* dense = nullptr;
    OP_REQUIRES_OK(context,
                   context->allocate_output(0, TensorShape({pointers.NumElements() - 1, outputs_}), &dense));
    const bool good = ForEachRow(context, pointers, columns, outputs_, 0.5 * dense->NumElements(),
                                 [&](int64_t row, int32_t first, int32_t last) {
                                   float* to = Floats(dense) + row * outputs_;
                                   std::fill_n(to, outputs_, 0.0f);
                                   for (int32_t k = first; k < last; ++k) to[Ints(columns)[k]] = Floats(values)[k];
                                 });
    OP_REQUIRES(context, good, InvalidArgument("columns must lie below ", outputs_));
  }

 private:
  int64_t outputs_;
};

absl::Status VectorInputs(InferenceContext* c, int first, int last) {
  ShapeHandle vector;
  for (int i = first; i <= last; ++i) TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 1, &vector));
  return absl::OkStatus();
}

REGISTER_OP("SparsekitStructure")
    .Input("keep: bool")
    .Output("row_pointers: int32")
    .Output("columns: int32")
    .Output("column_pointers: int32")
    .Output("rows: int32")
    .Output("permutation: int32")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle keep;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &keep));
      tensorflow::shape_inference::DimensionHandle pointers[2];
      for (int axis = 0; axis < 2; ++axis) TF_RETURN_IF_ERROR(c->Add(c->Dim(keep, axis), 1, &pointers[axis]));
      const ShapeHandle kept = c->Vector(c->UnknownDim());
      c->set_output(0, c->Vector(pointers[0]));
      c->set_output(1, kept);
      c->set_output(2, c->Vector(pointers[1]));
      c->set_output(3, kept);
      c->set_output(4, kept);
      return absl::OkStatus();
    });
REGISTER_KERNEL_BUILDER(Name("SparsekitStructure").Device(DEVICE_CPU), StructureOp);

REGISTER_OP("SparsekitGather")
    .Input("dense: float")
    .Input("row_pointers: int32")
    .Input("columns: int32")
    .Output("values: float")
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(VectorInputs(c, 1, 2));
      c->set_output(0, c->input(2));
      return absl::OkStatus();
    });
REGISTER_KERNEL_BUILDER(Name("SparsekitGather").Device(DEVICE_CPU), GatherOp);

REGISTER_OP("SparsekitScatter")
    .Input("values: float")
    .Input("row_pointers: int32")
    .Input("columns: int32")
    .Attr("outputs: int >= 0")
    .Output("dense: float")
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(VectorInputs(c, 0, 2));
      int64_t outputs = 0;
      TF_RETURN_IF_ERROR(c->GetAttr("outputs", &outputs));
      tensorflow::shape_inference::DimensionHandle inputs;
      TF_RETURN_IF_ERROR(c->Subtract(c->Dim(c->input(1), 0), 1, &inputs));
      c->set_output(0, c->Matrix(inputs, c->MakeDim(outputs)));
      return absl::OkStatus();
    });
REGISTER_KERNEL_BUILDER(Name("SparsekitScatter").Device(DEVICE_CPU), ScatterOp);

}  // namespace
}  // namespace sparsekit
