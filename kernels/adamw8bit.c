// One step of 8-bit AdamW over n parameters in the CPU's memory, in one pass: adamw8bit.py has the formula, and builds
// this file; dynamic_map.py has the map and the table. `grad` may be `parameter` itself.

#include "adamw.c"  // bfloat16, how it is read and rounded

#define BLOCK 256
#define FIRST_CELL ((127 - 23) << 7)
#define LAST_CELL ((127 << 7) - FIRST_CELL)

static inline int32_t bits_of(float x) {
    int32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

// Writes the codes of x[0..n-1] and returns their absmax.
static float quantize(const float *x, int n, uint8_t *codes, const int32_t *table) {
    int32_t largest = 0;  // as integers, among which a NaN is larger than all numbers
    _Pragma("omp simd reduction(max : largest)")
    for (int i = 0; i < n; i++) {
        int32_t magnitude = bits_of(x[i]) & 0x7fffffff;
        largest = magnitude > largest ? magnitude : largest;
    }
    float absmax;
    memcpy(&absmax, &largest, 4);
    float inverse = absmax >= 0x1p-126f ? 1 / absmax : 0;
    _Pragma("omp simd")
    for (int i = 0; i < n; i++) {
        int32_t bits = bits_of(x[i] * inverse), cell = ((bits >> 16) & 0x7fff) - FIRST_CELL;
        cell = cell < 0 ? 0 : cell > LAST_CELL ? LAST_CELL : cell;
        codes[i] = (table[bits < 0 ? cell + LAST_CELL + 1 : cell] + ((bits ^ (bits >> 31)) & 0xffff)) >> 16;
    }
    return absmax;
}

#define ADAMW8BIT(NAME, PARAMETER, GRAD)                                                                               \
    void NAME(PARAMETER *parameter, const GRAD *grad, float *w, uint8_t *m, uint8_t *v, float *m_absmax,               \
              float *v_absmax, const float *m_map, const int32_t *m_table, const float *v_map, const int32_t *v_table, \
              int64_t n, int threads, float scale, float lr, float m_correction, float sqrt_v_correction,              \
              float one_less_beta1, float one_less_beta2, float eps, float weight_decay) {                             \
        _Pragma("omp parallel for num_threads(threads) schedule(static)")                                              \
        for (int64_t start = 0; start < n; start += BLOCK) {                                                           \
            int64_t block = start / BLOCK;                                                                             \
            int size = n - start < BLOCK ? n - start : BLOCK;                                                          \
            float old_m_absmax = m_absmax[block], old_v_absmax = v_absmax[block], new_m[BLOCK], new_v[BLOCK];          \
            _Pragma("omp simd")                                                                                        \
            for (int j = 0; j < size; j++) {                                                                           \
                int64_t i = start + j;                                                                                 \
                float g = scale * read_##GRAD(grad[i]);                                                                \
                float old_m = m_map[m[i]] * old_m_absmax, old_v = v_map[v[i]] * old_v_absmax;                          \
                new_m[j] = old_m + one_less_beta1 * (g - old_m);                                                       \
                new_v[j] = old_v + one_less_beta2 * (g * g - old_v);                                                   \
                float step = new_m[j] * m_correction / (sqrtf(new_v[j]) * sqrt_v_correction + eps);                    \
                w[i] -= lr * (step + weight_decay * w[i]);                                                             \
                parameter[i] = round_to_##PARAMETER(w[i]);                                                             \
            }                                                                                                          \
            m_absmax[block] = quantize(new_m, size, m + start, m_table);                                               \
            v_absmax[block] = quantize(new_v, size, v + start, v_table);                                               \
            for (int j = 0; j < size; j++) v[start + j] += new_v[j] > 0 && v[start + j] == 0;                          \
        }                                                                                                              \
    }

ADAMW8BIT(adamw8bit_bfloat16_bfloat16, bfloat16, bfloat16)
ADAMW8BIT(adamw8bit_bfloat16_float, bfloat16, float)
ADAMW8BIT(adamw8bit_float_float, float, float)
