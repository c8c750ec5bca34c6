// Package memfd is memory of the CPU that the processes of one host share: files that live in memory (memfd_create(2)), sealed so that
// no process can make them smaller and crash the others. It is for Linux; on other systems it is empty.
//
// It may import nothing of this module but errors. Package group passes the files between processes.
package memfd
