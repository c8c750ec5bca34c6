//go:build !unix

package group

func openFileLimit() uint64 { return 0 }

func fileLimit(err error) error { return err }
