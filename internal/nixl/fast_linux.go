//go:build amd64 || arm64

package nixl

import "github.com/symmem/symmem/internal/dl"

// bindFast binds the functions that drive a transfer, which are called again and again, with [dl.Call].
func bindFast(lib *dl.Library, f *functions) {
	post, postErr := lib.Symbol("nixl_capi_post_xfer_req")
	status, statusErr := lib.Symbol("nixl_capi_get_xfer_status")
	notes, notesErr := lib.Symbol("nixl_capi_get_notifs")
	if postErr != nil || statusErr != nil || notesErr != nil {
		return // the table says so
	}
	f.post = func(agent, request, args handle) Status {
		return Status(int32(dl.Call(post, 3, uintptr(agent), uintptr(request), uintptr(args), 0, 0, 0, 0)))
	}
	f.status = func(agent, request handle) Status {
		return Status(int32(dl.Call(status, 2, uintptr(agent), uintptr(request), 0, 0, 0, 0, 0)))
	}
	f.getNotes = func(agent, list, args handle) Status {
		return Status(int32(dl.Call(notes, 3, uintptr(agent), uintptr(list), uintptr(args), 0, 0, 0, 0)))
	}
}
