// The layout is constant arithmetic for host and device: one walk on both sides.
#include "layout/window.hpp"

__global__ void window_bytes(unsigned long long* bytes, switchyard::layout::WindowShape shape) {
    const switchyard::layout::Window w = switchyard::layout::window_of(shape);
    bytes[0] = w.bytes;
    bytes[1] = w.cell_at(1, 2, 3, 4) + w.home_at(0, 5, 6) + w.flag_line(1, 2);
    bytes[2] = switchyard::layout::Word::of(7, 0, 3).bits;
}
