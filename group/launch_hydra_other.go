//go:build !linux

package group

// hydraDaemon returns "": only Linux says who has made a socket.
func hydraDaemon(string) string { return "" }
