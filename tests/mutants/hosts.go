package main

// The mutants of NCCL on several hosts, of what a rank receives, and of clocks.
func init() {
	hostTests := []stage{{"backend/nccl", "Host|Team", usual}}
	mutants = append(mutants,
		mutant{file: "backend/nccl/isle.go", why: "ranks are on one host though NCCL is told otherwise", tests: hostTests,
			old: "peers[firsts[r]].HostID != peers[r].HostID || ", new: ""},
		mutant{file: "backend/nccl/isle.go", why: "windows of several hosts are asked for", tests: hostTests,
			old: "case inOne && (b.isle.whole()", new: "case true || inOne && (b.isle.whole()"},
		mutant{file: "backend/nccl/isle.go", why: "windows of several hosts are asked for before NCCL has them", tests: hostTests,
			old: " || b.lib.Version() >= hostsToo):", new: " || b.lib.Version() > 0):"},
		mutant{file: "backend/nccl/isle.go", why: "a host's teams get one window", tests: hostTests,
			old: "	if slices.Equal(cut, hosts) {\n", new: "	if cut != nil {\n"},
		mutant{file: "backend/nccl/isle.go", why: "a host's communicator is left behind when it is cut into teams", tests: hostTests,
			old: "ending the communicators of the hosts\", b.endComm(ctx, host))", new: "ending the communicators of the hosts\", nil)"},
		mutant{file: "backend/nccl/nccl.go", why: "the communicators of hosts are left behind", tests: hostTests,
			old: "	if apart {\n", new: "	if false && apart {\n"},
		mutant{file: "backend/nccl/kept.go", why: "the communicators of hosts that were kept are left behind", tests: hostTests,
			old: "		err = errors.Join(err, b.endComm(ctx, l.near))\n", new: ""},
		mutant{file: "backend/nccl/meet.go", why: "hosts that only seem to be several cannot share a GPU", tests: hostTests,
			old: " && hosts[i] == hosts[j] {", new: " {"},
		mutant{file: "backend/nccl/window.go", why: "addresses are looked for by the group's ranks in a host's communicator", tests: hostTests,
			old: "p, err := w.native.Peer(at, 0)", new: "p, err := w.native.Peer(r+0*at, 0)"},
		mutant{file: "backend/nccl/allreduce.go", why: "symmetric kernels are asked for between hosts", tests: hostTests,
			old: "b.isle != nil && !b.isle.whole() {", new: "b.isle == nil {"},
		mutant{file: "backend/choose.go", why: "auto takes for several hosts what serves them on request", tests: []stage{{"backend", "Choose", usual}},
			old: "if c.OnRequest && !named && c.SeveralHosts {", new: "if false {"},
		mutant{file: "memory/signal_device.go", why: "barriers leave out ranks that have no addresses", tests: []stage{{"backend/nccl", "BetweenHosts", usual}},
			old: "	if err := d.reaches(-1); err != nil {", new: "	if err := d.reaches(d.memory.group.Rank()); err != nil {"},
		mutant{file: "kernels/library_collectives.go", why: "auto takes puts and signals where there are none", tests: []stage{{"backend/nccl", "BetweenHosts", usual}},
			old: "if len(library) > 0 && !m.CanSignal() {", new: "if len(library) > 9 {"},
		mutant{file: "group/answers.go", why: "the first of two fields counts", tests: []stage{{"group", "Answers", usual}},
			old: "			data, _ = protowire.ConsumeBytes(body[tag:n])\n", new: "			if data == nil {\n				data, _ = protowire.ConsumeBytes(body[tag:n])\n			}\n"},
		mutant{file: "group/handshake.go", why: "the moments of the service's own certificate count", tests: []stage{{"group", "ClocksDiffer", usual}},
			old: "InsecureSkipVerify: true} //nolint", new: "InsecureSkipVerify: true, VerifyConnection: func(s tls.ConnectionState) error {\n\t\t\tif c, now := s.PeerCertificates[0], time.Now(); now.Before(c.NotBefore) || now.After(c.NotAfter) {\n\t\t\t\treturn errors.New(\"expired\")\n\t\t\t}\n\t\t\treturn nil\n\t\t}} //nolint"},
	)
}
