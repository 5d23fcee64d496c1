// The installed library from C++: two ranks as threads, a result worked out by hand, an error caught by its type.
#include <switchyard/switchyard.h>
#include <switchyard/reference.hpp>
#include <switchyard/session.hpp>

#include <cstdio>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

using namespace switchyard;

// One token of four columns to experts 0 (rank 0) and 1 (rank 1), weights 2 and 0.5. Expert e gives (e + 1) * x, so
// out = 2 * 1x + 0.5 * 2x = 3x, exact in f32.
static bool play(Session& session) {
    const float base = static_cast<float>(session.rank() * 100);
    const float x[4] = {base + 1, base + 2, base + 3, base + 4};
    const int32_t ids[2] = {0, 1};
    const float weights[2] = {2, 0.5F};
    ExpertBatch batch = session.dispatch({.x = x, .tokens = 1, .topk_ids = ids});
    if (batch.rows() != 2) return false;  // one from each rank
    float tile[8];
    batch.gather_f32(0, 0, 2, tile);
    for (float& v : tile) v *= static_cast<float>(session.rank() + 1);
    std::memcpy(batch.y(), tile, sizeof tile);
    float out[4];
    session.combine(batch, {.topk_weights = weights, .out = out});
    for (int i = 0; i < 4; ++i)
        if (out[i] != 3 * x[i]) return false;
    return true;
}

int main() {
    if (std::string(sy_version()) != PACKAGE_VERSION) {
        std::fprintf(stderr, "the library says version %s, its package %s\n", sy_version(), PACKAGE_VERSION);
        return 1;
    }
    Options options;
    options.hidden = 4;
    options.topk = 2;
    options.experts = 2;
    options.tokens_max = 1;
    options.dtype = TokenType::f32;
    try {
        std::vector<Session> sessions = Session::open_local(options, 2);
        bool right[2] = {};
        std::thread other([&] { right[1] = play(sessions[1]); });
        right[0] = play(sessions[0]);
        other.join();
        if (!right[0] || !right[1]) {
            std::fprintf(stderr, "wrong result\n");
            return 1;
        }
        options.topk = 0;
        Session::open_local(options, 1);
        std::fprintf(stderr, "topk 0 was not refused\n");
        return 1;
    } catch (const Error& error) {  // its type crosses the border of a shared library
        if (error.code() != Code::bad_input) {
            std::fprintf(stderr, "%s\n", error.what());
            return 1;
        }
    }
    // Everything public can be linked, not only what a session uses.
    const float x[4] = {1, 2, 3, 4};
    const int32_t id = 0;
    options.topk = 1;
    const std::vector<reference::RankInput> inputs = {{x, 1, &id, nullptr}};
    const bool linked = reference::dispatch(options, inputs, 0).rows == 1 && find_option("depth") != nullptr &&
                        check_options(options, 1).ok() && std::string(code_name(Code::stale)) == "stale" &&
                        experts_of(1, 2, 3).first == 2 && Status(Code::stale, "text").text() == "text";
    std::puts(linked ? "C++: right" : "C++: wrong");
    return linked ? 0 : 1;
}
