// Package cheader compares a binding that was written by hand with the C header that it binds: the values of macros and enumerators, the sizes of
// types and the offsets of fields on 64-bit Linux, and the sizes of the arguments and results of functions. Only tests use it.
//
// A test says with [Check] what the binding has, and [Run] compares that with records of the header in several versions, which lie
// in the testdata folder of the binding's package: so a wrong number fails wherever the tests run. Where the environment variable
// [Env] names a folder with the headers themselves, each record is compared with its header too, and so nobody can have made it up.
// In CI the step headers does that (.ci/run), for the headers that come in small packages; HEADERS=all has them all, and
// HEADERS_RECORD=1 writes the records anew.
//
// A [Header] is read without a C compiler, and this package is not one either: it skips what it does not understand, such as most of C++. What is not
// known counts as a difference.
package cheader
