// Index arrays of a convolution kernel's mask; what they mean stands in conv.cc.

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "bits.h"
#include "parallel.h"
#include "tensorflow.h"

namespace sparsekit {
namespace {

// A block of operand channels should fit into the first-level cache, but its lists need enough entries on average to pay
// for reading and writing their sums once more.
constexpr int64_t kBlockVectors = 512;
constexpr double kForwardEntries = 6;
constexpr double kBackwardEntries = 10;
constexpr int64_t kStripCols = 8;

// Channels of a block: what fits or what the lists need, in blocks of about one size.
int64_t BlockOf(int64_t channels, int64_t vectors, double wanted) {
  const double least = std::max({static_cast<double>(kBlockVectors / vectors),
                                 std::min(wanted, static_cast<double>(channels)), 1.0});
  const int64_t blocks = std::max<int64_t>(static_cast<int64_t>(std::floor(channels / least)), 1);
  return (channels + blocks - 1) / blocks;
}

// The distinct remainders of tap * dilation by the stride along one axis, and which of them each tap has.
struct Phases {
  std::vector<int64_t> slot;
  int64_t count;

  Phases(int64_t taps, int64_t dilation, int64_t stride) : slot(taps) {
    for (int64_t tap = 0; tap < taps; ++tap) slot[tap] = tap * dilation % stride;
    std::vector<int64_t> used = slot;
    std::sort(used.begin(), used.end());
    used.erase(std::unique(used.begin(), used.end()), used.end());
    for (int64_t& one : slot) one = std::lower_bound(used.begin(), used.end(), one) - used.begin();
    count = used.size();
  }
};

class ConvStructureOp : public OpKernel {
 public:
  explicit ConvStructureOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("strides", &strides_));
    OP_REQUIRES_OK(context, context->GetAttr("dilations", &dilations_));
    OP_REQUIRES_OK(context, context->GetAttr("groups", &groups_));
    bool positive = strides_.size() == 2 && dilations_.size() == 2;
    for (const auto* pair : {&strides_, &dilations_}) {
      for (const int64_t number : *pair) positive &= number >= 1;
    }
    OP_REQUIRES(context, positive, InvalidArgument("strides and dilations must be two positive numbers each"));
  }

  void Compute(OpKernelContext* context) override {
    const Tensor& keep = context->input(0);
    OP_REQUIRES(context, keep.dims() == 4 && keep.NumElements() > 0 && keep.dim_size(3) % groups_ == 0,
                InvalidArgument("keep must be (rows, cols, channels of a group, filters) in ", groups_,
                                " groups, got shape ", keep.shape().DebugString()));
    OP_REQUIRES(context, keep.NumElements() * groups_ < std::numeric_limits<int32_t>::max(),
                InvalidArgument("a mask of shape ", keep.shape().DebugString(), " needs more than 32 bits an index"));
    const int64_t rows = keep.dim_size(0), cols = keep.dim_size(1), inner = keep.dim_size(2), filters = keep.dim_size(3);
    const int64_t taps = rows * cols, channels = inner * groups_, group_filters = filters / groups_;
    const uint8_t* bits = static_cast<const uint8_t*>(keep.data());
    const int64_t kept = CountSet(bits, 0, keep.NumElements());
    const double average = std::max(static_cast<double>(kept) * groups_ / (channels * filters), 1e-9);
    const int64_t reach_rows = (rows - 1) * dilations_[0] / strides_[0];
    const int64_t reach_cols = (cols - 1) * dilations_[1] / strides_[1];
    const Phases row_phases(rows, dilations_[0], strides_[0]);
    const Phases col_phases(cols, dilations_[1], strides_[1]);
    const int64_t phases = row_phases.count * col_phases.count;

    const int64_t strip_rows = taps == 1 ? 1 : 2;
    const int64_t in_block =
        BlockOf(channels, (strip_rows + reach_rows) * (kStripCols + reach_cols), kForwardEntries / average);
    const int64_t out_block =
        BlockOf(filters, (1 + reach_rows) * (kStripCols + reach_cols), kBackwardEntries * phases / average);
    const int64_t out_blocks = (filters + out_block - 1) / out_block;

    // Calls visit(tap, channel, filter) for each kept position, in the order of the value vector.
    const auto walk = [&](const auto& visit) {
      const uint8_t* at = bits;
      for (int64_t tap = 0; tap < taps; ++tap) {
        for (int64_t channel = 0; channel < inner; ++channel) {
          ForEachSet(at, 0, filters, [&](int64_t filter) {
            visit(tap, channel + filter / group_filters * inner, filter);
          });
          at += filters;
        }
      }
    };
    const auto forward = [&](int64_t tap, int64_t channel, int64_t filter) {
      return std::pair(channel / in_block * filters + filter, channel * taps + tap);
    };
    const auto backward = [&](int64_t tap, int64_t channel, int64_t filter) {
      const int64_t phase = row_phases.slot[tap / cols] * col_phases.count + col_phases.slot[tap % cols];
      return std::pair((phase * out_blocks + filter / out_block) * channels + channel, filter * taps + tap);
    };
    const int64_t in_blocks = (channels + in_block - 1) / in_block;
    OP_REQUIRES_OK(context, Sort(context, 0, in_blocks * filters, kept, walk, forward));
    OP_REQUIRES_OK(context, Sort(context, 3, phases * out_blocks * channels, kept, walk, backward));
  }

 private:
  // Outputs first ... first + 2: the positions sorted by list, each list in the order of the value vector.
  template <typename Walk, typename Entry>
  static absl::Status Sort(OpKernelContext* context, int first, int64_t lists, int64_t kept, const Walk& walk,
                           const Entry& entry) {
    Tensor* starts = nullptr;
    Tensor* taps = nullptr;
    Tensor* places = nullptr;
    TF_RETURN_IF_ERROR(context->allocate_output(first, TensorShape({lists + 1}), &starts));
    TF_RETURN_IF_ERROR(context->allocate_output(first + 1, TensorShape({kept}), &taps));
    TF_RETURN_IF_ERROR(context->allocate_output(first + 2, TensorShape({kept}), &places));
    int32_t* at = Ints(starts);
    std::fill_n(at, lists + 1, 0);
    walk([&](int64_t tap, int64_t channel, int64_t filter) { ++at[entry(tap, channel, filter).first + 1]; });
    std::partial_sum(at, at + lists + 1, at);
    std::vector<int32_t> next(at, at + lists);
    int32_t* const operands = Ints(taps);
    int32_t* const place_of = Ints(places);
    int32_t place = 0;
    walk([&](int64_t tap, int64_t channel, int64_t filter) {
      const auto [list, operand] = entry(tap, channel, filter);
      const int32_t k = next[list]++;
      operands[k] = static_cast<int32_t>(operand);
      place_of[k] = place++;
    });
    return absl::OkStatus();
  }

  std::vector<int64_t> strides_, dilations_;
  int64_t groups_;
};

REGISTER_OP("SparsekitConvStructure")
    .Input("keep: bool")
    .Attr("strides: list(int)")
    .Attr("dilations: list(int)")
    .Attr("groups: int >= 1")
    .Output("forward_starts: int32")
    .Output("forward_taps: int32")
    .Output("forward_places: int32")
    .Output("backward_starts: int32")
    .Output("backward_taps: int32")
    .Output("backward_places: int32")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle keep;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 4, &keep));
      for (int output = 0; output < 6; ++output) c->set_output(output, c->Vector(c->UnknownDim()));
      return absl::OkStatus();
    });
REGISTER_KERNEL_BUILDER(Name("SparsekitConvStructure").Device(DEVICE_CPU), ConvStructureOp);

}  // namespace
}  // namespace sparsekit
