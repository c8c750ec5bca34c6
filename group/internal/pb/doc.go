// Package pb holds the messages between the ranks of a job and the rendezvous service, generated from rendezvous.proto.
package pb

//go:generate ./generate.sh
