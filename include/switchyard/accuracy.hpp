// What a number format does to a tensor: measured on the user's own values, before it is used in earnest.
//
//   const Accuracy a = measure_accuracy({.x = x, .rows = T, .hidden = H, .dtype = TokenType::bf16, .format =
//   {Format::mxfp8_e5m2}}); if (a.is_poor()) std::puts(a.text().c_str());
#pragma once

#include <cstdint>
#include <string>

#include "switchyard/status.hpp"
#include "switchyard/types.hpp"

namespace switchyard {

struct AccuracyArgs {
    const void* x = nullptr;  ///< [rows, hidden] of dtype
    int64_t rows = 0;
    int64_t hidden = 0;      ///< columns, >= 1
    int64_t row_stride = 0;  ///< elements from one row to the next; 0 = hidden
    TokenType dtype = TokenType::f16;
    RowFormat format;  ///< of dispatch or of combine
};

/// The values that come back, against those that went in, in f64. Only values that were finite are compared.
struct SY_API Accuracy {
    int64_t values = 0;      ///< compared
    int64_t not_finite = 0;  ///< NaN or Inf in x
    int64_t lost = 0;        ///< finite in x, NaN or Inf when they came back: overflow, or a block with a NaN
    int64_t flushed = 0;     ///< not 0 in x, 0 when they came back
    double max_error = 0;    ///< largest |back - x|; of values that are not lost, as the following
    double mean_error = 0;   ///< mean |back - x|
    double snr_db = 0;       ///< 10 log10(sum x^2 / sum (back - x)^2); infinity when nothing differs
    int64_t worst_row = -1, worst_column = -1;  ///< where max_error is, or the first value that is lost

    /// About what a format with three bits of fraction reaches on evenly spread values; below it, look before you trust.
    static constexpr double poor_below_db = 24;
    bool is_poor(double below_db = poor_below_db) const { return lost > 0 || snr_db < below_db; }
    std::string text() const;  ///< one line
};

/// Encodes and decodes every row with the fastest kernels of this processor (their bytes are the definition's). Allocates one
/// row. Throws bad_input: sizes below 0, x null with rows, f32 with a format, a format that does not allow the rules given.
SY_API Accuracy measure_accuracy(const AccuracyArgs& args);

}  // namespace switchyard
