// Package survey turns what went wrong with a native library into doctor's answer about it: found but not usable and why, or not found, with every
// path that was tried and what to install. Each backend uses it for its libraries; it knows how package internal/dl reports, and nothing of any one
// library.
package survey
