/* The C interface as a C11 program sees it: one rank, one token, two experts. Linked into c_api_test. */
#include "switchyard/switchyard.h"

int c_caller_round(void);

/* 0 when dispatch and combine gave 0.5 * x + 0.25 * 2x = x, exact in f32; else the number of the step that failed. */
int c_caller_round(void) {
    sy_options options;
    if (sy_options_init(&options, sizeof options) != SY_OK) return 1;
    options.hidden = 4;
    options.topk = 2;
    options.experts = 2;
    options.tokens_max = 1;
    options.dtype = SY_F32;

    sy_session* session = NULL;
    if (sy_open_local(&options, 1, &session) != SY_OK) return 2;

    const float x[4] = {1.0F, -2.0F, 4.0F, 8.0F};
    const int32_t ids[2] = {1, 0};
    const float weights[2] = {0.25F, 0.5F};
    sy_dispatch_args out = {.struct_size = sizeof out, .x = x, .tokens = 1, .topk_ids = ids};
    sy_batch batch;
    if (sy_dispatch(session, &out, &batch) != SY_OK) return 3;

    sy_batch_view view = {.struct_size = sizeof view};
    if (sy_batch_get(&batch, &view) != SY_OK || view.rows != 2) return 4;
    for (int64_t e = 0; e < view.experts_local; ++e) { /* expert 0 gives x, expert 1 gives 2x */
        float tile[4];
        if (sy_batch_gather_f32(&batch, e, 0, 1, tile) != SY_OK) return 5;
        float* y = (float*)view.y + view.expert_offsets[e] * 4;
        for (int i = 0; i < 4; ++i) y[i] = (float)(e + 1) * tile[i];
    }

    float result[4];
    sy_combine_args home = {.struct_size = sizeof home, .topk_weights = weights, .out = result};
    if (sy_combine(session, &batch, &home) != SY_OK || batch.session != NULL) return 6;
    for (int i = 0; i < 4; ++i)
        if (result[i] != x[i]) return 7;
    return sy_free(&session) == SY_OK && session == NULL ? 0 : 8;
}
