#!/bin/sh
# Makes the .pb.go files from rendezvous.proto, in a temporary folder that is removed at the end. It needs Go, python3 and the
# two registries (proxy.golang.org, pypi.org); protoc comes inside the Python package grpcio-tools. All versions are fixed, so
# that the result can be compared byte by byte.
set -eu

grpcio_tools=1.85.1
protoc_gen_go=v1.36.12
protoc_gen_go_grpc=v1.6.2

cd "$(dirname "$0")"
tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT

python3 -m venv "$tools/python"
"$tools/python/bin/pip" install --quiet --disable-pip-version-check "grpcio-tools==$grpcio_tools"
GOBIN="$tools" GOFLAGS= go install "google.golang.org/protobuf/cmd/protoc-gen-go@$protoc_gen_go"
GOBIN="$tools" GOFLAGS= go install "google.golang.org/grpc/cmd/protoc-gen-go-grpc@$protoc_gen_go_grpc"
PATH="$tools:$PATH" "$tools/python/bin/python" -m grpc_tools.protoc --proto_path=. \
	--go_out=. --go_opt=paths=source_relative \
	--go-grpc_out=. --go-grpc_opt=paths=source_relative \
	rendezvous.proto
