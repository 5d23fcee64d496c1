/* The installed library from C: one rank, one token, a result worked out by hand, a refusal with its text. */
#include <stdio.h>
#include <string.h>
#include <switchyard/switchyard.h>

#define CHECK(call)                                                  \
    if ((call) != SY_OK) {                                           \
        fprintf(stderr, "line %d: %s\n", __LINE__, sy_last_error()); \
        return 1;                                                    \
    }

int main(void) {
    sy_options options;
    CHECK(sy_options_init(&options, sizeof options));
    options.hidden = 2;
    options.topk = 2;
    options.experts = 3;
    options.tokens_max = 1;
    CHECK(sy_options_set(&options, "dtype", "f32"));
    if (sy_options_set(&options, "dtype", "f64") != SY_BAD_INPUT || !strstr(sy_last_error(), "bf16")) return 1;

    sy_session* session = NULL;
    CHECK(sy_open_local(&options, 1, &session));
    const float x[2] = {3.0F, -5.0F};
    const int32_t ids[2] = {2, 0};
    sy_dispatch_args out = {.struct_size = sizeof out, .x = x, .tokens = 1, .topk_ids = ids};
    sy_batch batch;
    CHECK(sy_dispatch(session, &out, &batch));
    sy_batch_view view = {.struct_size = sizeof view};
    CHECK(sy_batch_get(&batch, &view));
    const void* rows = NULL;
    CHECK(sy_batch_expand_x(&batch, &rows, NULL));
    memcpy(view.y, rows, (size_t)(view.rows * view.payload_bytes));
    float result[2];
    sy_combine_args home = {.struct_size = sizeof home, .out = result};
    CHECK(sy_combine(session, &batch, &home));
    CHECK(sy_free(&session));
    if (result[0] != 6.0F || result[1] != -10.0F) { /* two experts that give x back, weight 1 */
        fprintf(stderr, "got %g %g\n", result[0], result[1]);
        return 1;
    }
    puts("C: right");
    return 0;
}
