#include "switchyard/accuracy.hpp"

#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <vector>

#include "quant/numbers.hpp"
#include "quant/quant.hpp"

namespace switchyard {

Accuracy measure_accuracy(const AccuracyArgs& args) {
    const auto bad = [](std::string text) { return Error(Status(Code::bad_input, "measure_accuracy: " + std::move(text))); };
    if (args.rows < 0 || args.hidden < 1 || (args.row_stride != 0 && args.row_stride < args.hidden))
        throw bad(
            fmt::format("{} rows of {} columns, row_stride {}; allowed: rows from 0, columns from 1, row_stride 0 or at "
                        "least as many as columns.",
                        args.rows, args.hidden, args.row_stride));
    if (!args.x && args.rows > 0) throw bad(fmt::format("x is null with {} rows.", args.rows));
    if (args.dtype == TokenType::f32 && args.format.format != Format::none)
        throw bad("f32 tokens travel as they are; choose f16 or bf16.");
    if (args.format.mx_overflow == MxOverflow::inf && args.format.format == Format::mxfp8_e4m3)
        throw bad("mx_overflow inf is of mxfp8_e5m2; E4M3 has no infinity.");

    const layout::RowLayout size = layout::row_layout(args.format.format, args.dtype, args.hidden);
    const quant::Kernels& kernels = *quant::find_kernels(Simd::automatic);
    const RowFormat as_it_is{};
    std::vector<std::byte> payload(static_cast<size_t>(size.payload_bytes)),
        scales(static_cast<size_t>(size.scale_bytes()) + 1);
    std::vector<float> in(static_cast<size_t>(args.hidden)), back(in.size());
    const int64_t stride = (args.row_stride ? args.row_stride : args.hidden) * layout::token_bytes(args.dtype);
    Accuracy a;
    double signal = 0, noise = 0, sum = 0;
    for (int64_t r = 0; r < args.rows; ++r) {
        const std::byte* row = static_cast<const std::byte*>(args.x) + r * stride;
        kernels.decode(as_it_is, args.dtype, row, nullptr, args.hidden, in.data());
        kernels.encode(args.format, args.dtype, row, args.hidden, payload.data(), scales.data());
        kernels.decode(args.format, args.dtype, payload.data(), scales.data(), args.hidden, back.data());
        for (int64_t c = 0; c < args.hidden; ++c) {
            const double x = in[static_cast<size_t>(c)], y = back[static_cast<size_t>(c)];
            if (!std::isfinite(x)) {
                ++a.not_finite;
                continue;
            }
            ++a.values;
            if (!std::isfinite(y)) {
                if (a.lost++ == 0) a.worst_row = r, a.worst_column = c;
                continue;
            }
            a.flushed += x != 0 && y == 0;
            const double error = std::abs(y - x);
            signal += x * x, noise += error * error, sum += error;
            if (error > a.max_error) {
                a.max_error = error;
                if (a.lost == 0) a.worst_row = r, a.worst_column = c;
            }
        }
    }
    if (a.values > a.lost) a.mean_error = sum / static_cast<double>(a.values - a.lost);
    a.snr_db = noise > 0 ? 10 * std::log10(signal / noise) : std::numeric_limits<double>::infinity();
    return a;
}

std::string Accuracy::text() const {
    std::string line = fmt::format("SNR {:.1f} dB, error {:.3g} at most and {:.3g} on average of {} values", snr_db, max_error,
                                   mean_error, values);
    if (worst_row >= 0) line += fmt::format(", worst at row {}, column {}", worst_row, worst_column);
    if (flushed > 0) line += fmt::format("; {} became 0", flushed);
    if (lost > 0) line += fmt::format("; {} finite values came back as NaN or Inf", lost);
    if (not_finite > 0) line += fmt::format("; {} were NaN or Inf before", not_finite);
    return line;
}

}  // namespace switchyard
