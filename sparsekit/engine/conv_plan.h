// Geometry of a convolution: how pixels map to tiles, and which tiles to take.
#ifndef SPARSEKIT_ENGINE_CONV_PLAN_H_
#define SPARSEKIT_ENGINE_CONV_PLAN_H_

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "conv_tiles.h"

namespace sparsekit {

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// One spatial axis. In padded coordinates an input pixel is P = pixel + pad = j * stride + phase, and output pixel q
// meets tap k at P = q * stride + k * dilation: within the phase of the tap, at j = q + shift of the tap.
struct Axis {
  int64_t in = 0, out = 0, kernel = 1, dilation = 1, stride = 1, pad = 0;
  int64_t reach = 0;            // largest shift
  int64_t base = 0;             // j of the first input pixel
  std::vector<int64_t> phases;  // those that some tap meets
  std::vector<int64_t> slot_of_tap, shift_of_tap;

  void Resolve() {
    reach = (kernel - 1) * dilation / stride;
    base = pad / stride;
    phases.clear();
    for (int64_t k = 0; k < kernel; ++k) phases.push_back(k * dilation % stride);
    std::sort(phases.begin(), phases.end());
    phases.erase(std::unique(phases.begin(), phases.end()), phases.end());
    slot_of_tap.resize(kernel);
    shift_of_tap.resize(kernel);
    for (int64_t k = 0; k < kernel; ++k) {
      slot_of_tap[k] = std::lower_bound(phases.begin(), phases.end(), k * dilation % stride) - phases.begin();
      shift_of_tap[k] = k * dilation / stride;
    }
  }

  int64_t BackwardSpan() const { return std::max(CeilDiv(in + pad, stride) - base, out); }
};

// Tiles of tile_rows x tile_cols, worked on in strips of strip_rows x strip_cols pixels; kLanes tiles are one group.
struct Plan {
  int64_t strip_rows = 1, strip_cols = 1, tile_rows = 1, tile_cols = 1;
  int64_t across = 1, down = 1, tiles = 0, groups = 0;
  int64_t packed_cols = 1, channel_stride = 1;  // of the tile with its halo, in vectors

  Lanes LanesOf(int64_t group) const {
    Lanes lanes;
    for (int l = 0; l < kLanes; ++l) {
      const int64_t tile = group * kLanes + l;
      lanes.image[l] = tile < tiles ? tile / (across * down) : -1;
      lanes.row[l] = tile / across % down * tile_rows;
      lanes.col[l] = tile % across * tile_cols;
    }
    return lanes;
  }
};

// What a plan is chosen for. All counts are per pixel or per layer, not per batch.
struct Load {
  int64_t batch, rows, cols;              // pixels to cover, in tile coordinates
  int64_t halo_rows, halo_cols;           // extra pixels of the packed tile
  int64_t tile_channels, strip_channels;  // channels packed with the halo, and channels of a strip's results
  int64_t entries, phases;                // kept weights, and input phases
  int64_t max_strip_rows, max_strip_cols;
  double per_vector, per_entry, per_row;  // cycles: one entry on one vector, one entry on a strip, one list on a strip
};

// Takes the cheapest plan by a count of cycles; it depends on the shapes alone, never on the number of threads, so
// the order of every sum is fixed.
inline Plan ChoosePlan(const Load& load) {
  constexpr double kPackCycles = 6.0;               // to move and transpose one vector
  constexpr double kTileBytes = 1.0 * (1 << 20);    // leaves room in a 2 MB second-level cache
  constexpr int64_t kSides[] = {1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32};
  Plan best;
  double best_cost = std::numeric_limits<double>::infinity();
  for (int64_t strip_rows = 1; strip_rows <= load.max_strip_rows; ++strip_rows) {
    for (int64_t strip_cols = 1; strip_cols <= load.max_strip_cols; ++strip_cols) {
      for (const int64_t rows : kSides) {
        if (rows % strip_rows != 0 || rows >= load.rows + strip_rows) continue;
        for (const int64_t cols : kSides) {
          if (cols % strip_cols != 0 || cols >= load.cols + strip_cols) continue;
          // Without a halo a larger tile saves nothing, and lanes that lie further apart fall into fewer cache sets.
          if (load.halo_rows + load.halo_cols == 0 && (rows > strip_rows || cols > strip_cols)) continue;
          Plan plan;
          plan.strip_rows = strip_rows;
          plan.strip_cols = strip_cols;
          plan.tile_rows = rows;
          plan.tile_cols = cols;
          plan.down = CeilDiv(load.rows, rows);
          plan.across = CeilDiv(load.cols, cols);
          plan.tiles = load.batch * plan.down * plan.across;
          plan.groups = CeilDiv(plan.tiles, kLanes);
          plan.packed_cols = cols + load.halo_cols;
          // An odd count of cache lines between channels spreads them over all sets of the cache.
          plan.channel_stride = (rows + load.halo_rows) * plan.packed_cols | 1;
          const double strip = static_cast<double>(strip_rows * strip_cols);
          const double strips = rows * cols / strip;
          const double packed = static_cast<double>(plan.channel_stride) * load.tile_channels;
          const double bytes = packed * kVectorBytes;
          double cost = strips * load.entries * (load.per_vector * strip + load.per_entry) +
                        strips * load.phases * load.strip_channels * (load.per_row + 2 * kPackCycles * strip) +
                        kPackCycles * packed;
          cost *= 1.0 + 0.05 * bytes / kTileBytes;
          if (bytes > kTileBytes) cost *= bytes / kTileBytes;
          cost *= static_cast<double>(CeilDiv(plan.groups, 8) * 8);
          if (cost < best_cost) {
            best_cost = cost;
            best = plan;
          }
        }
      }
    }
  }
  return best;
}

}  // namespace sparsekit

#endif  // SPARSEKIT_ENGINE_CONV_PLAN_H_
