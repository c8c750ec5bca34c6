package cheader_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/internal/cheader"
)

// source has of everything that the headers of NVIDIA's libraries have, something.
const source = `
#ifndef GUARD /* of
	two lines */
#define GUARD
#include <stdlib.h>
#include "other.h"
#define API(name) name
#define VERSIONED(name) name ## _v2
#define allocate VERSIONED(allocate)
#define FLAG (1u << 3) // eight
#define MAGIC 0xcafebeef
#define NEGATIVE -1
#define START { sizeof(outer), NULL, { MAGIC, (1 << 16) + SMALL }, NEGATIVE }
#define STAR *
#define LONG \
	(SMALL + \
	 2)
#if defined(NOT_THERE) && NOT_THERE(1) > 2
#define BRANCH 1
#elif OTHER >= 7 && !defined NOT_THERE
#define BRANCH 2
#else
#define BRANCH 3
#endif
#ifdef __cplusplus
extern "C" {
#endif
struct pair_st { char a; short b, c[3]; };
typedef enum kind_enum { KIND_NONE = 0x0, KIND_A = FLAG, KIND_B, KIND_SIZE = sizeof(struct pair_st) * 2, KIND_INT = (int)-7, } kind;
enum { SMALL = 5 };
typedef enum : unsigned char { TINY_ONE = 1 } tiny;
typedef struct handle_st *handle;
struct later;
typedef struct later later_t;
typedef struct outer_st {
	kind type;
	union { int i; void *p; struct { char x; long long y; } in; } value;
	struct pair_st pairs[2];
	unsigned char tail: 3, rest: 6;
	const char *const name;
	void (*call)(int, char *);
} outer;
struct later { outer o; bool last; };
typedef struct half_st { int known; struct not_known field; int after; } half;
typedef struct aligned_st { _Alignas(64) int a; } aligned;
int API(allocate)(handle *h, unsigned long long bytes, const struct pair_st p, int flags[2], kind k);
extern void nothing(void);
__attribute__((visibility("default"))) later_t *give(...);
static inline int body(int a) { return a > 2 ? sizeof(a) : API(a); }
int after_body(not_known_t n, void (*fn)(void *), handle h);
template <typename T> struct cpp { T t; };
int last(void);
#endif
`

func TestRead(t *testing.T) {
	folder := t.TempDir()
	main := filepath.Join(folder, "main.h")
	require.NoError(t, os.WriteFile(main, []byte(source), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(folder, "other.h"), []byte("#define OTHER 7\n"), 0o600))
	h, err := cheader.Read(cheader.Options{Files: []string{main}, Defines: map[string]string{"GIVEN": "3"}, Prelude: "typedef int given_t;"})
	require.NoError(t, err)

	for name, want := range map[string]int64{"FLAG": 8, "MAGIC": 0xcafebeef, "NEGATIVE": -1, "LONG": 7, "BRANCH": 2, "OTHER": 7, "GIVEN": 3,
		"KIND_NONE": 0, "KIND_A": 8, "KIND_B": 9, "KIND_SIZE": 20, "KIND_INT": -7, "SMALL": 5, "TINY_ONE": 1} {
		got, ok := h.Const(name)
		assert.True(t, ok, name)
		assert.Equal(t, want, got, name)
	}
	for _, name := range []string{"STAR", "API", "NOT_THERE", "GUARD"} {
		_, ok := h.Const(name)
		assert.False(t, ok, name)
	}
	for i, want := range map[int]int64{0: 64, 2: 0xcafebeef, 3: 1<<16 + 5, 4: -1} {
		got, ok := h.Element("START", i)
		assert.True(t, ok, i)
		assert.Equal(t, want, got, i)
	}
	for _, i := range []int{1, 5} {
		_, ok := h.Element("START", i)
		assert.False(t, ok, i)
	}
	for name, want := range map[string]int64{"kind": 4, "handle": 8, "struct pair_st": 10, "pair_st": 10, "outer": 64, "later_t": 72, "given_t": 4, "size_t": 8, "tiny": 1} {
		got, ok := h.Size(name)
		assert.True(t, ok, name)
		assert.Equal(t, want, got, name)
	}
	for _, name := range []string{"half", "aligned", "struct handle_st", "nobody"} {
		_, ok := h.Size(name)
		assert.False(t, ok, name)
	}
	for field, want := range map[string][2]int64{"type": {0, 4}, "value": {8, 16}, "value.in.y": {16, 8}, "value.p": {8, 8}, "pairs": {24, 20},
		"name": {48, 8}, "call": {56, 8}} {
		offset, size, ok := h.Offset("outer", field)
		assert.True(t, ok, field)
		assert.Equal(t, want, [2]int64{offset, size}, field)
	}
	_, _, ok := h.Offset("outer", "value.nobody")
	assert.False(t, ok)
	offset, _, _ := h.Offset("later_t", "o.pairs")
	assert.EqualValues(t, 24, offset)

	for name, want := range map[string]cheader.Func{
		"allocate_v2": {4, []int64{8, 8, 10, 8, 4}}, "nothing": {0, []int64{}}, "give": {8, []int64{-1}}, "body": {4, []int64{4}},
		"after_body": {4, []int64{-1, 8, 8}}, "last": {4, []int64{}},
	} {
		got, ok := h.Func(name)
		assert.True(t, ok, name)
		assert.Equal(t, want, got, name)
	}
	_, ok = h.Func("allocate")
	assert.False(t, ok)
	require.NoError(t, os.WriteFile(main, []byte("int allocate_v2(void); int older(int);"), 0o600))
	more, err := cheader.Read(cheader.Options{Files: []string{main}})
	require.NoError(t, err)
	h.AddFuncs(more)
	older, _ := h.Func("older")
	assert.Equal(t, cheader.Func{Result: 4, Args: []int64{4}}, older)
	kept, _ := h.Func("allocate_v2")
	assert.Len(t, kept.Args, 5)
	_, err = cheader.Read(cheader.Options{Files: []string{filepath.Join(folder, "nobody.h")}})
	require.ErrorIs(t, err, os.ErrNotExist)
}

// cython is a declaration file as NVIDIA generates them.
const cython = `# a comment
from libc.stdint cimport (
    int16_t,
)
from libcpp cimport bool as _cyb_bool

ctypedef enum kind_t "kind_t":
    KIND_A "KIND_A" = 3
    KIND_B "KIND_B"
    KIND_C "KIND_C" = -(2147483648)

cdef extern from *:
    """
    #include <driver_types.h>
    """
    ctypedef void* stream_t 'stream_t'

ctypedef uint32_t number 'number'

cdef struct node:
    node* next
    _cyb_bool flag
    kind_t kind
    char name[5]
ctypedef node node_t

ctypedef union either 'either':
    int i
    char* s

# functions
cdef kind_t call(node_t* n, const char* name, number a, stream_t stream) except?_KIND_T_INTERNAL nogil
cdef const char* text(kind_t k) except?NULL nogil
`

func TestReadCython(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.pxd")
	require.NoError(t, os.WriteFile(path, []byte(cython), 0o600))
	h, err := cheader.ReadCython(path)
	require.NoError(t, err)
	for name, want := range map[string]int64{"KIND_A": 3, "KIND_B": 4, "KIND_C": -2147483648} {
		got, ok := h.Const(name)
		assert.True(t, ok, name)
		assert.Equal(t, want, got, name)
	}
	size, _ := h.Size("node_t")
	assert.EqualValues(t, 24, size)
	size, _ = h.Size("either")
	assert.EqualValues(t, 8, size)
	offset, size, ok := h.Offset("node", "name")
	assert.True(t, ok)
	assert.Equal(t, [2]int64{16, 5}, [2]int64{offset, size})
	call, _ := h.Func("call")
	assert.Equal(t, cheader.Func{Result: 4, Args: []int64{8, 8, 4, 8}}, call)
	text, _ := h.Func("text")
	assert.Equal(t, cheader.Func{Result: 8, Args: []int64{4}}, text)
	_, err = cheader.ReadCython(path + "x")
	require.ErrorIs(t, err, os.ErrNotExist)
}
