package main

import "slices"

// The tests of packages, and the suite in one process on the backends that need nothing, with peer pointers and without.
var (
	memoryTests    = stage{"memory", ".", usual}
	tensorTests    = stage{"tensor", ".", usual}
	manyTests      = stage{"kernels", "TestMany|TestCut|TestWholeGeometry", long}
	tuningTests    = stage{"kernels/tuning", ".", usual}
	planTests      = stage{"collective", ".", usual}
	hostTests      = stage{"backend/host", ".", usual}
	nativeTests    = stage{"backend/native", ".", usual}
	worldOfTwo     = stage{"tests", "TestMatrix/backend=(host|far)/world=2/goroutines", usual}
	worldOfMore    = stage{"tests", "TestMatrix/backend=(host|far)/world=(3|5)/goroutines", long} // in short of host five, of far three
	nvshmemTests   = stage{"backend/nvshmem", "Collectives", usual}
	ncclTests      = stage{"backend/nccl", ".", long}
	nixlTests      = stage{"backend/nixl", ".", usual}
	conditionTests = stage{"group", "Conditions", usual}
	exitTests      = stage{"group", "AgreedFailure", usual}
	openTests      = stage{".", "Open|InheritedSocket|Example", long}
	callTests      = []stage{{".", "Plans|Coll|Calls", usual}}
	kills          = stage{"tests", "TestKill/backend=(host|far)", long}
	systemCalls    = stage{"tests/chaos", "EverySystemCall", long}
	turnTests      = stage{"backend/nvshmem", "InATurn|Enqueue", long}

	// Those of kernels but for rails, fused ones and the like, in stages that end in time. All of them in one would not.
	kernelTests = []stage{
		{"kernels", "Program$|Pieces$|Places$|^TestTables|^TestForms|^TestPushGeometry|^TestParts|^TestCut|^TestReducer|^TestAverage|^TestRegister", usual},
		{"kernels", "OnHost$|NotOverrun$|^TestHostRanks|^TestSlots|RankOrder$|^TestPlan|^TestRanksMake|^TestMissing|Refused$|^TestBarrierPlan|^TestWideLoops", usual},
		{"kernels", "^TestTransfersFail|^TestFailedRun|^TestCollectivesFar|^TestIslandC", usual},
		{"kernels", "^TestOneShotInPlace|^TestManyOnCUDA|^TestManyWhole|^TestWholeMovesTold|^TestBegun|^TestLate|Multicast$|^TestLibrary|^TestCopyEngines|^TestPulled", usual},
		{"kernels", "^TestCollectivesOnCUDA|^TestTransfersOnCUDA", long},
	}

	slotTests = []stage{{"kernels", "^TestSlotsAreNotOverrun", usual}}
	meetTests = []stage{{"kernels", "^TestHostRanksMeet", usual}}

	inSuite      = []stage{memoryTests, hostTests, nativeTests, worldOfTwo, worldOfMore}
	inPlans      = with(kernelTests, hostTests, worldOfTwo, worldOfMore)
	inCollective = with([]stage{planTests}, inPlans...)
	inTransfers  = []stage{{"kernels", "Program$|Pieces$", usual}, {"kernels", "^TestCollectivesOnCUDA|^TestTransfersOnCUDA", long}}
	inSends      = with(with([]stage{memoryTests, hostTests}, kernelTests...), worldOfTwo, worldOfMore)
	inTensor     = []stage{tensorTests, worldOfTwo, worldOfMore}
	onFakes      = with([]stage{memoryTests, nativeTests}, kernelTests...)
)

// with gives the stages of base, and more behind them.
func with(base []stage, more ...stage) []stage { return append(slices.Clone(base), more...) }

var mutants = []mutant{
	{
		file: "memory/signal_host.go", why: "a recorded signal does nothing", tests: inSuite,
		old: "\treturn launch(s, &h.signals[channel*h.size+peer])",
		new: "\tif s.Capturing() {\n\t\treturn nil\n\t}\n\treturn launch(s, &h.signals[channel*h.size+peer])",
	},
	{
		file: "memory/signal_host.go", why: "a recorded wait does nothing", tests: inSuite,
		old: "\treturn launch(s, &h.waits[channel*h.size+peer])",
		new: "\tif s.Capturing() {\n\t\treturn nil\n\t}\n\treturn launch(s, &h.waits[channel*h.size+peer])",
	},
	{
		file: "memory/signal_host.go", why: "a recorded barrier does nothing", tests: inSuite,
		old: "\treturn launch(s, &h.barriers[channel])",
		new: "\tif s.Capturing() {\n\t\treturn nil\n\t}\n\treturn launch(s, &h.barriers[channel])",
	},
	{
		file: "memory/signal_host.go", why: "a plan's recorded signals do nothing", tests: inPlans,
		old: "\treturn launch(s, &h.signalAlls[channel])",
		new: "\tif s.Capturing() {\n\t\treturn nil\n\t}\n\treturn launch(s, &h.signalAlls[channel])",
	},
	{
		file: "memory/signal_host.go", why: "a plan's recorded waits do nothing", tests: inPlans,
		old: "\treturn launch(s, &h.waitAlls[channel])",
		new: "\tif s.Capturing() {\n\t\treturn nil\n\t}\n\treturn launch(s, &h.waitAlls[channel])",
	},
	{
		file: "memory/signal_flags.go", why: "a recorded signal by flags does nothing", tests: inSuite,
		old: "\treturn device.EnqueueHostWork(s, l)",
		new: "\tif s.Capturing() {\n\t\treturn nil\n\t}\n\treturn device.EnqueueHostWork(s, l)",
	},
	{
		file: "memory/signal_flags.go", why: "a recorded wait by flags does nothing", tests: inSuite,
		old: "\treturn device.EnqueueHostWork(s, &f.channels[channel].waits[peer])",
		new: "\tif s.Capturing() {\n\t\treturn nil\n\t}\n\treturn device.EnqueueHostWork(s, &f.channels[channel].waits[peer])",
	},
	{
		file: "memory/signal_flags.go", why: "a recorded barrier by flags does nothing", tests: inSuite,
		old: "\treturn device.EnqueueHostWork(s, &f.channels[channel].barrier)",
		new: "\tif s.Capturing() {\n\t\treturn nil\n\t}\n\treturn device.EnqueueHostWork(s, &f.channels[channel].barrier)",
	},
	{
		file: "memory/transfer.go", why: "a recorded put or get does nothing", tests: inSuite,
		old: "\tif own, ok := m.transferrer(w.near[peer]); ok {\n\t\tfollows, err",
		new: "\tif s.Capturing() {\n\t\treturn nil\n\t}\n\tif own, ok := m.transferrer(w.near[peer]); ok {\n\t\tfollows, err",
	},
	{
		file: "collective/host.go", why: "a recorded run does nothing", tests: inCollective,
		old: "\t\treturn l.Launch((*recordedRun)(w))",
		new: "\t\treturn nil",
	},
	{
		file: "collective/program.go", why: "a recorded run by transfers does nothing", tests: inCollective,
		old: "\tfor i := range w.steps {\n\t\tif err := w.step(",
		new: "\tif recorded {\n\t\treturn nil\n\t}\n\tfor i := range w.steps {\n\t\tif err := w.step(",
	},
	{
		file: "memory/signal_host.go", why: "a barrier waits for nobody", tests: inSuite,
		old: "\tfor peer, w := range k.mine {\n\t\tif err := w.WaitAtLeast(epoch,",
		new: "\tfor peer, w := range k.mine[:0] {\n\t\tif err := w.WaitAtLeast(epoch,",
	},
	{
		file: "memory/signal_host.go", why: "a barrier's epoch stays: only the first one waits", tests: inSuite,
		old: "\tepoch := k.epoch.Add(1)\n",
		new: "\tepoch := k.epoch.Load() + 1\n",
	},
	{
		file: "memory/signal_host.go", why: "barriers leave rank 0 out", tests: inSuite,
		old: "\tfor _, w := range k.theirs {\n\t\tw.Add(1)\n\t}\n\tfor peer, w := range k.mine {",
		new: "\tfor _, w := range k.theirs[1:] {\n\t\tw.Add(1)\n\t}\n\tfor peer, w := range k.mine[1:] {",
	},
	{
		file: "memory/signal_host.go", why: "a wait consumes nothing", tests: inSuite,
		old: "\twant := k.consumed.Add(1)\n",
		new: "\twant := k.consumed.Load() + 1\n",
	},
	{
		file: "memory/signal_host.go", why: "a wait is satisfied one signal too early", tests: inSuite,
		old: "\tif int32(k.word.Load()-want) >= 0 {\n\t\treturn nil\n\t}\n\tif err := k.word.WaitAtLeast(want",
		new: "\tif int32(k.word.Load()-want) >= -1 {\n\t\treturn nil\n\t}\n\tif err := k.word.WaitAtLeast(want",
	},
	{
		file: "memory/signal_host.go", why: "a wait compares without counting in a circle", tests: inSuite,
		old: "\tif int32(k.word.Load()-want) >= 0 {",
		new: "\tif k.word.Load() >= want {",
	},
	{
		file: "memory/signal_host.go", why: "signals are not counted", tests: inSuite,
		old: "\tk.word.Add(1)\n\treturn nil",
		new: "\tk.word.Store(k.word.Load() | 1)\n\treturn nil",
	},
	{
		file: "memory/signal_host.go", why: "a signal is written to the own pad", tests: inSuite,
		old: "\t\t\tout, err1 := word(peer, c, padSignal, me)",
		new: "\t\t\tout, err1 := word(me, c, padSignal, peer)",
	},
	{
		file: "memory/signal_host.go", why: "a barrier looks at another rank's counter", tests: inSuite,
		old: "word(me, c, padBarrier, peer)",
		new: "word(me, c, padBarrier, (peer+1)%size)",
	},
	{
		file: "memory/signal_host.go", why: "all writers have one counter", tests: inSuite,
		old: "(channel*padKinds+kind)*size+writer",
		new: "(channel*padKinds+kind)*size",
	},
	{
		file: "memory/signal_host.go", why: "channels share counters", tests: inSuite,
		old: "((channel*padKinds+kind)*size+writer)*padStride",
		new: "((channel%2*padKinds+kind)*size+writer)*padStride",
	},
	{
		file: "memory/signal_host.go", why: "signals and barriers share counters", tests: inSuite,
		old: "((channel*padKinds+kind)*size+writer)*padStride",
		new: "((channel*padKinds)*size+writer)*padStride",
	},
	{
		file: "memory/signal_host.go", why: "a plan signals and waits for higher ranks only", tests: inPlans,
		old: "\t\t\tif peer != me && user.has(c, peer) {",
		new: "\t\t\tif peer > me && user.has(c, peer) {",
	},
	{
		file: "memory/signal_host.go", why: "a plan's counters begin at 0", tests: inPlans,
		old: "\t\t\t\tin.Store(user.begin(c))\n",
		new: "",
	},
	{
		file: "memory/signal_host.go", why: "what a plan has consumed begins at 0", tests: inPlans,
		old: "\t\t\t\tw.consumed.Store(user.First)\n",
		new: "",
	},
	{
		file: "memory/signal_host.go", why: "a plan that has failed goes on signalling", tests: inSends,
		old: "\tif k.user.failedBefore() {\n\t\treturn nil // what the peer waits for may not be there\n\t}\n\tk.word.Add(1)",
		new: "\tk.word.Add(1)",
	},
	{
		file: "memory/signal_host.go", why: "a plan that has failed goes on waiting", tests: inSends,
		old: "\tif k.user.failedBefore() {\n\t\treturn k.user.tell()\n\t}\n\twant",
		new: "\twant",
	},
	{
		file: "memory/signal_host.go", why: "what fails beside a plan's stream is told there", tests: inSends,
		old: "\t\t\tif k.beside {\n\t\t\t\treturn nil\n\t\t\t}\n",
		new: "",
	},
	{
		file: "memory/signal_host.go", why: "waits have no bound", tests: inSuite,
		old: "Deadline: time.Now().Add(m.opts.KernelTimeout)",
		new: "Deadline: time.Now().Add(1000 * m.opts.KernelTimeout)",
	},
	{
		file: "memory/signal_host.go", why: "waits do not look for lost peers", tests: with(inSuite, kills),
		old: ", Err: m.peerErr}",
		new: "}",
	},
	{
		file: "memory/signal_host.go", why: "graphs go on with signals after their memory was closed", tests: inSuite,
		old: "\tif err := k.memory.kept(); err != nil {\n\t\treturn err\n\t}\n\tif k.user.failedBefore() {\n\t\treturn nil // what",
		new: "\tif k.user.failedBefore() {\n\t\treturn nil // what",
	},
	{
		file: "memory/signal_host.go", why: "graphs go on with waits after their memory was closed", tests: inSuite,
		old: "\tif err := k.memory.kept(); err != nil {\n\t\treturn err\n\t}\n\tif k.user.failedBefore() {\n\t\treturn k.user.tell",
		new: "\tif k.user.failedBefore() {\n\t\treturn k.user.tell",
	},
	{
		file: "memory/signal_host.go", why: "graphs go on with barriers after their memory was closed", tests: inSuite,
		old: "\tif err := k.memory.kept(); err != nil {\n\t\treturn err\n\t}\n\tepoch := k.epoch",
		new: "\tepoch := k.epoch",
	},
	{
		file: "memory/signal_flags.go", why: "a word that is half written counts", tests: inSuite,
		old: "uint32(w), uint32(w) == uint32(w>>32)",
		new: "uint32(w), true",
	},
	{
		file: "memory/signal_flags.go", why: "a plan's flags begin at 0", tests: inPlans,
		old: "\t\t\t\ts.words[i].Store(twice(user.begin(c)))\n",
		new: "",
	},
	{
		file: "memory/signal_flags.go", why: "what a plan has consumed of its flags begins at 0", tests: inPlans,
		old: "\t\t\t\ts.consumed[i].Store(user.First)\n",
		new: "",
	},
	{
		file: "memory/signal_flags.go", why: "what a plan has sent begins at 0", tests: inPlans,
		old: "\t\tl.sent = f.user.begin(channel)\n\t\tl.delivered = l.sent\n",
		new: "",
	},
	{
		file: "memory/signal_flags.go", why: "signals and barriers share flags", tests: inSuite,
		old: "\treturn (channel*padKinds+kind)*f.size + writer\n",
		new: "\treturn channel*padKinds*f.size + writer\n",
	},
	{
		file: "memory/signal_flags.go", why: "flags are written to another rank's place", tests: inSuite,
		old: "f.index(channel, kind, me)); err != nil",
		new: "f.index(channel, kind, peer)); err != nil",
	},
	{
		file: "memory/signal_flags.go", why: "a wait for a flag consumes nothing", tests: inSuite,
		old: "count: w.signals.consumed[i].Add(1)",
		new: "count: w.signals.consumed[i].Load() + 1",
	},
	{
		file: "memory/signal_flags.go", why: "a wait for a flag is satisfied too early", tests: inSuite,
		old: "whole && int32(have-r.count) >= 0",
		new: "whole && int32(have-r.count) >= -1",
	},
	{
		file: "memory/signal_flags.go", why: "only the first barrier by flags waits", tests: inSuite,
		old: "epoch: b.signals.epochs[b.channel].Add(1)",
		new: "epoch: 1",
	},
	{
		file: "memory/signal_flags.go", why: "a barrier by flags tells and does not wait", tests: inSuite,
		old: "\t\tif m.over = told && whole && int32(have-r.epoch) >= 0; !m.over {",
		new: "\t\tif m.over = told && (whole || int32(have-r.epoch) < 0 || true); !m.over {",
	},
	{
		file: "memory/signal_flags.go", why: "a barrier by flags ends before it has told", tests: inSuite,
		old: "\t\tif m.over = told && whole &&",
		new: "\t\tif m.over = (told || true) && whole &&",
	},
	{
		file: "memory/signal_flags.go", why: "signals by flags are not counted", tests: inSuite,
		old: "\tl.sent++\n",
		new: "\tl.sent = 1\n",
	},
	{
		file: "memory/signal_flags.go", why: "an error of writing a flag is not told", tests: inSuite,
		old: "\t\t\tif err != nil {\n\t\t\t\treturn false, err // the next write brings the count all the same\n\t\t\t}\n",
		new: "\t\t\t_ = err\n",
	},
	{
		file: "memory/signal_flags.go", why: "a signal that was not written counts as delivered", tests: inSuite,
		old: "\t\t\tl.delivered = l.flying\n",
		new: "\t\t\tl.delivered = l.sent\n",
	},
	{
		file: "memory/signal_flags.go", why: "waits for flags do not look for lost peers", tests: with(inSuite, kills),
		old: "\tf.flags.Progress()\n\tif err := f.memory.group.Err(); err != nil {\n\t\treturn err\n\t}\n",
		new: "\tf.flags.Progress()\n",
	},
	{
		file: "memory/signal_flags.go", why: "waits for flags have no bound", tests: inSuite,
		old: "\tif limit := f.memory.opts.KernelTimeout; time.Since(began) >= limit {",
		new: "\tif limit := f.memory.opts.KernelTimeout; time.Since(began) >= 1000*limit {",
	},
	{
		file: "memory/signal_flags.go", why: "a plan leaves the next rank out of its signals", tests: inPlans,
		old: "\tfor k := 1; k < f.size; k++ {\n\t\tpeer := (f.memory",
		new: "\tfor k := 2; k < f.size; k++ {\n\t\tpeer := (f.memory",
	},
	{
		file: "memory/signal_flags.go", why: "what a plan waits for beside its stream fails there", tests: inSends,
		old: "\treturn ended || err != nil, nil\n",
		new: "\treturn ended, err\n",
	},
	{
		file: "memory/signal_flags.go", why: "a plan's signal that fails is not told", tests: inSends,
		old: "\t\t\tu.failLater(err)\n\t\t\treturn true, nil",
		new: "\t\t\treturn true, nil",
	},
	{
		file: "memory/signal_flags.go", why: "graphs go on with signals by flags after their memory was closed", tests: inSuite,
		old: "\tif err := l.signals.memory.kept(); err != nil {\n\t\treturn nil, err\n\t}\n\tif l.signals.user.failedBefore()",
		new: "\tif l.signals.user.failedBefore()",
	},
	{
		file: "memory/signal_flags.go", why: "graphs go on with waits by flags after their memory was closed", tests: inSuite,
		old: "\tif err := w.signals.memory.kept(); err != nil {\n\t\treturn nil, err\n\t}\n\tif w.signals.user.failedBefore() {\n\t\treturn nothing{}, w.",
		new: "\tif w.signals.user.failedBefore() {\n\t\treturn nothing{}, w.",
	},
	{
		file: "memory/signal_flags.go", why: "graphs go on with a plan's signals by flags after their memory was closed", tests: inSuite,
		old: "\tif err := w.signals.memory.kept(); err != nil {\n\t\treturn nil, err\n\t}\n\tif w.signals.user.failedBefore() {\n\t\treturn nothing{}, nil // it",
		new: "\tif w.signals.user.failedBefore() {\n\t\treturn nothing{}, nil // it",
	},
	{
		file: "memory/signal_flags.go", why: "graphs go on with barriers by flags after their memory was closed", tests: inSuite,
		old: "\tif err := b.signals.memory.kept(); err != nil {\n\t\treturn nil, err\n\t}\n\trun := b.signals.meetings",
		new: "\trun := b.signals.meetings",
	},
	{
		file: "memory/signal_flags.go", why: "a plan that has failed goes on signalling by flags one by one", tests: inSends,
		old: "\tif l.signals.user.failedBefore() {",
		new: "\tif false {",
	},
	{
		file: "memory/signal_flags.go", why: "a plan that has failed goes on waiting for flags", tests: inSends,
		old: "\tif w.signals.user.failedBefore() {\n\t\treturn nothing{}, w.signals.user.tell()\n\t}\n",
		new: "",
	},
	{
		file: "memory/signal_flags.go", why: "a plan that has failed goes on signalling by flags", tests: inSends,
		old: "\tif w.signals.user.failedBefore() {\n\t\treturn nothing{}, nil // it may have no lanes any more\n\t}\n",
		new: "",
	},
	{
		file: "memory/signal_flags.go", why: "a wait beside a plan's stream that the stream gave up is not told", tests: inSends,
		old: "{ w.signals.user.failLater(err) }",
		new: "{}",
	},
	{
		file: "memory/signal_flags.go", why: "a wait beside a plan's stream that does not begin fails there", tests: inSends,
		old: "\t\treturn (*flagBeside)(runs), nil\n\t}\n\treturn nothing{}, nil\n",
		new: "\t\treturn (*flagBeside)(runs), nil\n\t}\n\treturn nothing{}, err\n",
	},
	{
		file: "memory/signal_flags.go", why: "flags are not given back", tests: inSuite,
		old: "\treturn errors.Join(err, f.flags.Close())\n",
		new: "\treturn err\n",
	},
	{
		file: "memory/signal_flags.go", why: "writes of flags are not given back", tests: inSuite,
		old: "\t\t\terr = errors.Join(err, l.close())\n",
		new: "\t\t\t_ = l\n",
	},
	{
		file: "memory/signal_plan.go", why: "nothing is granted to a plan", tests: inPlans,
		old: "\tif channel >= u.Channels-u.Granted {",
		new: "\tif channel > u.Channels-u.Granted {",
	},
	{
		file: "memory/signal_plan.go", why: "a wait in vain does not end the plan", tests: inSends,
		old: "\tu.dead.Store(true)\n\ttold := u.Failed(err)\n",
		new: "\ttold := u.Failed(err)\n",
	},
	{
		file: "memory/signal_plan.go", why: "what a wait in vain has met is not kept", tests: inSends,
		old: "first := u.why.CompareAndSwap(nil, &err)",
		new: "first := false",
	},
	{
		file: "memory/signal_plan.go", why: "a put that failed does not end the plan", tests: inSends,
		old: "{ _ = u.fail(fmt.Errorf(",
		new: "{ _ = u.Failed(fmt.Errorf(",
	},
	{
		file: "memory/signal_plan.go", why: "a plan knows that it has failed while it still signals", tests: []stage{{"memory", "SignalsEndFirst", usual}},
		old: "\tu.dead.Store(true)\n\ttold := u.Failed(err)\n",
		new: "\ttold := u.Failed(err)\n\tu.dead.Store(true)\n",
	},
	{
		file: "memory/signal_plan.go", why: "what failed is not told to later waits", tests: inSends,
		old: "\t\treturn *why\n",
		new: "\t\treturn nil\n",
	},
	{
		file: "memory/signal_plan.go", why: "a graph of a closed plan is not told", tests: inSends,
		old: "\tif u.closed.Load() {\n",
		new: "\tif false {\n",
	},
	{
		file: "memory/signal_plan.go", why: "more channels may be granted than there are", tests: inSends,
		old: "o.Channels < 1 || o.Granted < 0 || o.Granted > o.Channels",
		new: "o.Channels < 1",
	},
	{
		file: "memory/signal_plan.go", why: "signals may lie beyond their workspace", tests: inSends,
		old: "offset < 0 || offset%padStride != 0 || offset > w.Bytes()-m.padBytes(o.Channels)",
		new: "offset < 0",
	},
	{
		file: "memory/signal_plan.go", why: "ranks do not vote whether all have a plan's signals", tests: inSends,
		old: "\tif vote := m.group.Vote(ctx, \"signals\", err); vote != nil {\n\t\tif err == nil {",
		new: "\tif vote := err; vote != nil {\n\t\tif err == nil {",
	},
	{
		file: "memory/turn.go", why: "a call waits for its turn longer than its context lasts", tests: inSends,
		old: "\tcase <-ctx.Done():\n\t}\n\tt := p.turn",
		new: "\t}\n\tt := p.turn",
	},
	{
		file: "memory/turn.go", why: "the others are not told of a call that gave up before its turn", tests: inSends,
		old: "\t\t\t\t_ = within(context.WithoutCancel(ctx), gaveUp)",
		new: "\t\t\t\tfor _, p := range places {\n\t\t\t\t\tp.leave()\n\t\t\t\t}",
	},
	{
		file: "memory/heap.go", why: "a heap's call takes its place in the memory's turn late", tests: inSends,
		old: "\there, all := h.join(what)\n\treturn c.doAt(ctx, what, call, here, all)",
		new: "\there := h.order.join(what)\n\tdefer here.leave()\n\tif err := here.wait(ctx, what); err != nil {\n\t\treturn err\n\t}\n\treturn c.do(ctx, what, call)",
	},
	{
		file: "memory/heap.go", why: "an allocation of a full heap takes its place in the memory's turn late", tests: inSends,
		old: "return h.memory.collective.doAt(ctx, h.reclaiming(), h.reclaimNow, all)",
		new: "all.leave()\n\t\t\treturn h.memory.collective.do(ctx, h.reclaiming(), h.reclaimNow)",
	},
	{
		file: "memory/heap.go", why: "a heap's call in a turn of its memory waits for the heap's", tests: inSends,
		old: "\tif c.within(ctx) != nil {\n\t\treturn c.do(ctx, what, call)\n\t}\n",
		new: "",
	},
	{
		file: "memory/heap.go", why: "an allocation in a turn of its memory waits for the heap's", tests: inSends,
		old: "if h.memory.collective.within(ctx) == nil {",
		new: "if true {",
	},
	{
		file: "memory/turn.go", why: "a call that gave up is made in its turn as if it had not", tests: inSends,
		old: "_ = within(context.WithoutCancel(ctx), gaveUp)",
		new: "_ = within(context.WithoutCancel(ctx), nil)",
	},
	{
		file: "memory/signal_plan.go", why: "a plan's signals are made while another collective call is under way", tests: inSends,
		old: "return inTurn(ctx, &w.memory.collective, \"making",
		new: "return inTurn(ctx, new(turn), \"making",
	},
	{
		file: "memory/signal_plan.go", why: "signals in a closed workspace", tests: inSends,
		old: "\tcase w.closed.Load():\n",
		new: "\tcase false:\n",
	},
	{
		file: "memory/signal_plan.go", why: "ranks do not vote before they make flags", tests: inSends,
		old: "\tif _, ok := m.flagger(); ok { // making flags is collective\n",
		new: "\tif _, ok := m.flagger(); ok && false {\n",
	},
	{
		file: "memory/signal_plan.go", why: "signals that some ranks have are left open", tests: inSends,
		old: "\t\t\tvote = m.giveUpSignals(made, vote)\n",
		new: "\t\t\tvote = errors.Join(vote)\n",
	},
	{
		file: "memory/signal_plan.go", why: "graphs of a closed plan signal", tests: inSends,
		old: "\tp.user.dead.Store(true)\n\tif p.workspace.Err() == nil {",
		new: "\tif p.workspace.Err() == nil {",
	},
	{
		file: "memory/signal_plan.go", why: "signals are given back that peers may still write", tests: inCollective,
		old: "\tif p.workspace.Err() == nil {",
		new: "\tif p.workspace == nil {",
	},
	{
		file: "memory/signal.go", why: "ranks do not vote whether all have signal pads", tests: inSuite,
		old: "\tif vote := m.group.Vote(ctx, \"signal pads\", err); vote != nil {",
		new: "\tif vote := err; vote != nil {",
	},
	{
		file: "memory/signal.go", why: "a channel too many", tests: inSuite,
		old: "\tif channel < 0 || channel >= m.opts.Channels {",
		new: "\tif channel < 0 || channel > m.opts.Channels {",
	},
	{
		file: "memory/signal.go", why: "signals to ranks that do not exist", tests: inSuite,
		old: "\tif err := m.checkRank(op, peer); err != nil {\n\t\treturn nil, err\n\t}\n\tif channel",
		new: "\tif channel",
	},
	{
		file: "memory/signal.go", why: "signals of a closed memory", tests: inSuite,
		old: "\tif err := m.Err(); err != nil {\n\t\treturn nil, fmt.Errorf(\"%s: %w\", op, err)\n\t}\n",
		new: "",
	},
	{
		file: "memory/signal.go", why: "signal pads that some ranks have are left open", tests: inSuite,
		old: "\t\t\tvote = m.giveUpSignals(s, vote)\n",
		new: "\t\t\tvote = errors.Join(vote)\n",
	},
	{
		file: "memory/signal_device.go", why: "a plan's pads on GPUs are at the beginning of its workspace", tests: onFakes,
		old: "\t\tp = p.Add(offset)\n",
		new: "",
	},
	{
		file: "memory/signal_device.go", why: "channel and peer change places on GPUs", tests: onFakes,
		old: "params.Index, params.Peer = uint32(channel), uint32(peer)",
		new: "params.Index, params.Peer = uint32(peer), uint32(channel)",
	},
	{
		file: "memory/signal_device.go", why: "a barrier on GPUs has 32 threads only", tests: onFakes,
		old: "\tif kind >= launchBarrier {",
		new: "\tif kind > launchBarrier {",
	},
	{
		file: "memory/signal_device.go", why: "launches for all peers are one", tests: onFakes,
		old: "(kind*d.channels+channel)*size+peer",
		new: "(kind*d.channels+channel)*size",
	},
	{
		file: "memory/signal_device.go", why: "signals on GPUs are never atomic", tests: onFakes,
		old: "\t\td.params.Flags |= ptx.Atomics\n",
		new: "",
	},
	{
		file: "memory/signal_device.go", why: "links of unknown devices have atomics", tests: onFakes,
		old: "len(uuids) > 0 && !",
		new: "!",
	},
	{
		file: "memory/memory.go", why: "ranks do not vote whether all have mapped", tests: inSuite,
		old: "\t\tif err := m.group.Vote(group.Heard(ctx), \"mapping\", mapErr); err != nil {",
		new: "\t\tif err := mapErr; err != nil {",
	},
	{
		file: "memory/memory.go", why: "what was mapped stays when another rank could not map", tests: inSuite,
		old: "\t\t\t\terr = errors.Join(err, mapping.Unmap(context.WithoutCancel(ctx)))\n",
		new: "",
	},
	{
		file: "memory/memory.go", why: "rendezvous are not counted", tests: inSuite,
		old: "\tm.operations++ // only",
		new: "\t// only",
	},
	{
		file: "memory/memory.go", why: "an allocation is mapped again and again", tests: inSuite,
		old: "\tif e.window != nil {\n\t\treturn e.window, nil\n\t}\n\tw := &Window",
		new: "\tw := &Window",
	},
	{
		file: "memory/memory.go", why: "ranks do not agree whether memory is mapped", tests: inSuite,
		old: "what.Bytes, what.RoundedBytes, what.Mapped = a.Bytes(), a.RoundedBytes(), e.window != nil",
		new: "what.Bytes, what.RoundedBytes = a.Bytes(), a.RoundedBytes()",
	},
	{
		file: "memory/memory.go", why: "freeing does not wait for the device", tests: inSuite,
		old: "\tif err := m.device.Synchronize(ctx); err != nil {\n\t\treturn err\n\t}\n\tif q,",
		new: "\tif q,",
	},
	{
		file: "memory/memory.go", why: "freeing does not wait for the other ranks", tests: inSuite,
		old: "\terr := m.group.Vote(group.Heard(ctx), op, failure)\n",
		new: "\terr := failure\n",
	},
	{
		file: "memory/memory.go", why: "freeing does not wait for the library", tests: inSuite,
		old: "\t\treturn q.Quiesce(ctx)\n",
		new: "\t\t_ = q\n",
	},
	{
		file: "memory/window.go", why: "the window of freed memory stays open", tests: inSuite,
		old: "\tif w.entry.released() {\n",
		new: "\tif false {\n",
	},
	{
		file: "memory/memory.go", why: "memory that was kept is forgotten", tests: inSuite,
		old: "\t\te.closing.Store(false)\n\t\tm.add(e)\n",
		new: "\t\te.closing.Store(false)\n",
	},
	{
		file: "memory/memory.go", why: "a rank that frees again votes again", tests: inSuite,
		old: "\t\te.left = busy != nil\n",
		new: "",
	},
	{
		file: "memory/memory.go", why: "closing again is refused", tests: inSuite,
		old: "\tm.left = busy != nil\n",
		new: "",
	},
	{
		file: "memory/memory.go", why: "prepared copies outlive their memory", tests: inSuite,
		old: "\terr = errors.Join(err, m.copies.forget(e))\n",
		new: "",
	},
	{
		file: "memory/memory.go", why: "-1 bytes are allocated", tests: inSuite,
		old: "\tif bytes < 0 {\n\t\tinvalid",
		new: "\tif bytes < -1 {\n\t\tinvalid",
	},
	{
		file: "memory/memory.go", why: "Find takes the byte behind an allocation", tests: inSuite,
		old: "uint64(off) >= uint64(e.alloc.Bytes()) {",
		new: "uint64(off) > uint64(e.alloc.Bytes()) {",
	},
	{
		file: "memory/memory.go", why: "Find knows first bytes only", tests: inSuite,
		old: "\t\toff := p - e.alloc.Ptr()\n",
		new: "\t\toff := p - e.alloc.Ptr()\n\t\tif off != 0 {\n\t\t\tcontinue\n\t\t}\n",
	},
	{
		file: "memory/memory.go", why: "memory of others is taken to a rendezvous", tests: inSuite,
		old: "\tcase a == nil || e == nil:",
		new: "\tcase a == nil:",
	},
	{
		file: "memory/memory.go", why: "closing leaves the backend open", tests: inSuite,
		old: "\terr = errors.Join(err, m.compiled.close(), m.backend.Close(context.WithoutCancel(ctx)))\n",
		new: "\terr = errors.Join(err, m.compiled.close())\n",
	},
	{
		file: "memory/memory.go", why: "a memory does not know of lost peers", tests: with(inSuite, kills),
		old: "\treturn m.group.Err()\n}\n\n// Closed is",
		new: "\treturn nil\n}\n\n// Closed is",
	},
	{
		file: "memory/memory.go", why: "graphs work on after their memory was closed", tests: inSuite,
		old: "\tif m.gone.Load() {\n",
		new: "\tif false {\n",
	},
	{
		file: "memory/memory.go", why: "freeing does not wait for calls that enqueue", tests: inSuite,
		old: "return poll(ctx, func() bool { return e.uses.Load() == 0 })",
		new: "return nil",
	},
	{
		file: "memory/memory.go", why: "work is enqueued on memory that is being freed", tests: inSuite,
		old: "\tif e.closing.Load() {\n",
		new: "\tif false {\n",
	},
	{
		file: "memory/memory.go", why: "memory that is being freed is not sealed", tests: inSuite,
		old: "\t\tif err := e.seal(ctx); err != nil {\n\t\t\treturn err\n\t\t}\n",
		new: "\t\t_ = e\n",
	},
	{
		file: "memory/memory.go", why: "memory that was kept takes no work", tests: inSuite,
		old: "\t\te.closing.Store(false)\n\t\tm.add(e)\n",
		new: "\t\tm.add(e)\n",
	},
	{
		file: "memory/memory.go", why: "collective allocation while another collective call is under way", tests: inSuite,
		old: "return inTurn(ctx, &m.collective, fmt.Sprintf(\"allocating",
		new: "return inTurn(ctx, new(turn), fmt.Sprintf(\"allocating",
	},
	{
		file: "memory/memory.go", why: "memory is allocated while the backend is closed", tests: inSuite,
		old: "\tdefer m.locals.leave()\n\tif err := errors.Join(invalid",
		new: "\tm.locals.leave()\n\tif err := errors.Join(invalid",
	},
	{
		file: "memory/memory.go", why: "memory is registered while the backend is closed", tests: inSuite,
		old: "\tdefer m.locals.leave()\n\tif err := m.Err(); err != nil {\n\t\treturn nil, fmt.Errorf(\"registering",
		new: "\tm.locals.leave()\n\tif err := m.Err(); err != nil {\n\t\treturn nil, fmt.Errorf(\"registering",
	},
	{
		file: "memory/memory.go", why: "memory is freed while the backend is closed", tests: inSuite,
		old: "\tif e != nil {\n\t\tdefer m.locals.leave()\n",
		new: "\tif e != nil {\n\t\tm.locals.leave()\n",
	},
	{
		file: "memory/memory.go", why: "ranks do not compare sizes before a collective allocation", tests: inSuite,
		old: "\t\t\tif _, err := m.exchange(group.Heard(ctx), m.record(\"allocate\", name, &Record{Bytes: bytes}), errors.Join(gaveUp, invalid, m.Err())); err != nil {",
		new: "\t\t\tif err := errors.Join(gaveUp, invalid, m.Err()); err != nil {",
	},
	{
		file: "memory/memory.go", why: "ranks do not vote whether all have allocated", tests: inSuite,
		old: "\t\tif vote := m.group.Vote(ctx, \"allocate\", err); vote != nil {",
		new: "\t\tif vote := err; vote != nil {",
	},
	{
		file: "memory/memory.go", why: "memory that another rank could not allocate is not released", tests: inSuite,
		old: "\t\t\t\terr = errors.Join(vote, a.Release(context.WithoutCancel(ctx)))\n",
		new: "\t\t\t\terr = vote\n",
	},
	{
		file: "memory/memory.go", why: "memory is allocated after it was closed", tests: inSuite,
		old: "\tif err := errors.Join(invalid, m.Err()); err != nil {",
		new: "\tif err := invalid; err != nil {",
	},
	{
		file: "memory/memory.go", why: "a rank that cannot allocate does not excuse itself", tests: inSuite,
		old: "\t\tm.group.Excuse(err) // the others may wait for this rank's rendezvous\n",
		new: "",
	},
	{
		file: "memory/memory.go", why: "memory is registered after it was closed", tests: inSuite,
		old: "\tif err := m.Err(); err != nil {\n\t\treturn nil, fmt.Errorf(\"registering",
		new: "\tif err := error(nil); err != nil {\n\t\treturn nil, fmt.Errorf(\"registering",
	},
	{
		file: "memory/memory.go", why: "backends that adopt nothing are asked to", tests: inSuite,
		old: "\tif c := m.backend.Capabilities(); !c.Register {",
		new: "\tif c := m.backend.Capabilities(); false {",
	},
	{
		file: "memory/memory.go", why: "0 bytes are registered", tests: inSuite,
		old: "\tif bytes <= 0 || p.IsNil() {",
		new: "\tif bytes < 0 || p.IsNil() {",
	},
	{
		file: "memory/memory.go", why: "nothing is registered", tests: inSuite,
		old: "\tif bytes <= 0 || p.IsNil() {",
		new: "\tif bytes <= 0 {",
	},
	{
		file: "memory/memory.go", why: "a rank that cannot register does not excuse itself", tests: inSuite,
		old: "\t\tm.group.Excuse(err)\n",
		new: "",
	},
	{
		file: "memory/memory.go", why: "rendezvous while another collective call is under way", tests: inSuite,
		old: "return inTurn(ctx, &m.collective, \"rendezvous\"",
		new: "return inTurn(ctx, new(turn), \"rendezvous\"",
	},
	{
		file: "memory/memory.go", why: "freeing while another collective call is under way", tests: inSuite,
		old: "return m.collective.do(ctx, fmt.Sprintf(\"freeing",
		new: "return new(turn).do(ctx, fmt.Sprintf(\"freeing",
	},
	{
		file: "memory/memory.go", why: "closing while another collective call is under way", tests: inSuite,
		old: "m.collective.do(ctx, \"closing symmetric memory\"",
		new: "new(turn).do(ctx, \"closing symmetric memory\"",
	},
	{
		file: "memory/memory.go", why: "allocations have no name at their rendezvous", tests: inSuite,
		old: "\t\t\twhat.Name = e.name\n",
		new: "\t\t\twhat.Name = \"\"\n",
	},
	{
		file: "memory/memory.go", why: "memory is freed alone while its rendezvous is under way", tests: inSuite,
		old: "\te.meeting = true\n",
		new: "",
	},
	{
		file: "memory/memory.go", why: "a rendezvous that failed never ends as far as its memory knows", tests: inSuite,
		old: "\te.meeting = false\n",
		new: "\te.meeting = true\n",
	},
	{
		file: "memory/memory.go", why: "memory with a window is freed alone", tests: inSuite,
		old: "\t\t\tif local && (e.window != nil || e.untold || e.meeting) {",
		new: "\t\t\tif local && e.meeting {",
	},
	{
		file: "memory/memory.go", why: "memory without a window is freed under the device", tests: inSuite,
		old: "\t\tbusy, err = m.settle(ctx, e.gone.Store, e)\n",
		new: "",
	},
	{
		file: "memory/memory.go", why: "freed memory does not tell graphs that it is gone", tests: inSuite,
		old: "\tgone(true)\n",
		new: "",
	},
	{
		file: "memory/memory.go", why: "memory is released under what a graph has begun meanwhile", tests: []stage{{"memory", "LaunchedMeanwhile", usual}},
		old: "\tif busy, broken = m.idleOrBroken(ctx); busy != nil {\n\t\tgone(false)",
		new: "\tif busy != nil {\n\t\tgone(false)",
	},
	{
		file: "memory/memory.go", why: "graphs do not go on when their memory was kept", tests: []stage{{"memory", "OfMemoryThatWasKept", usual}},
		old: "\t\tgone(false)\n\t\treturn err, nil\n",
		new: "\t\treturn err, nil\n",
	},
	{
		file: "memory/signal_plan.go", why: "graphs signal on a workspace that is being closed", tests: []stage{{"memory", "LaunchedWhileFreeing", usual}},
		old: "\t\terr = u.workspace.Err()\n",
		new: "",
	},
	{
		file: "memory/memory.go", why: "freed memory stays mapped", tests: inSuite,
		old: "\t\terr = errors.Join(err, e.window.mapping.Unmap(ctx))\n",
		new: "",
	},
	{
		file: "memory/memory.go", why: "freed memory is not released", tests: inSuite,
		old: "\treturn errors.Join(err, e.alloc.Release(ctx))\n",
		new: "\treturn err\n",
	},
	{
		file: "memory/memory.go", why: "memory is closed twice", tests: inSuite,
		old: "\tif m.closed.Load() && !m.left {",
		new: "\tif false {",
	},
	{
		file: "memory/memory.go", why: "Close does not wait for local calls under way", tests: inSuite,
		old: "\t\tif busy = m.locals.end(ctx); busy != nil {\n",
		new: "\t\tif m.locals.shut = true; busy != nil {\n",
	},
	{
		file: "memory/memory.go", why: "Close waits for local calls longer than its context lasts", tests: inSuite,
		old: "\t\tif busy = m.locals.end(ctx); busy != nil {\n",
		new: "\t\tif busy = m.locals.end(context.WithoutCancel(ctx)); busy != nil {\n",
	},
	{
		file: "memory/memory.go", why: "a rank that closes again asks the others again, who have closed", tests: inSuite,
		old: "\tcase !m.agreed:\n",
		new: "\tcase true:\n",
	},
	{
		file: "memory/memory.go", why: "what the others have closed is freed with a vote", tests: inSuite,
		old: "\tif err := m.Closed(); err != nil { // the others",
		new: "\tif err := m.Closed(); err != nil && false { // the others",
	},
	{
		file: "memory/memory.go", why: "Close does not wait for calls that enqueue signals", tests: inSuite,
		old: "going := append(slices.Clone(m.entries), &m.enqueuing)\n",
		new: "going := slices.Clone(m.entries)\n",
	},
	{
		file: "memory/memory.go", why: "work is enqueued on allocations of a heap that is being freed", tests: inSuite,
		old: "\tif e.whole != nil {\n\t\tif err := e.whole.use(); err != nil {\n\t\t\treturn err\n\t\t}\n\t}\n\te.uses.Add(1)\n\tif e.closing.Load() {\n\t\te.unuse()\n",
		new: "\te.uses.Add(1)\n\tif e.closing.Load() {\n\t\te.uses.Add(-1)\n",
	},
	{
		file: "memory/memory.go", why: "the uses of a heap's allocation never end", tests: inSuite,
		old: "\tif e.whole != nil {\n\t\te.whole.unuse()\n\t}\n",
		new: "",
	},
	{
		file: "memory/transfer.go", why: "memory is freed while a transfer of it is prepared", tests: inSuite,
		old: "\tdefer unuseSides(sides)\n\tt := &Transfer",
		new: "\tunuseSides(sides)\n\tt := &Transfer",
	},
	{
		file: "memory/send.go", why: "peers get the signal of a send that could not copy", tests: inSuite,
		old: "\treturned = true\n\tif err != nil {\n\t\tuser.failLater(err)\n\t}\n\treturn nil\n",
		new: "\treturned = true\n\treturn err\n",
	},
	{
		file: "memory/send.go", why: "peers get the signal of a send whose copies have panicked", tests: inSuite,
		old: "\t\tif !returned { // the stream has the panic\n",
		new: "\t\tif !returned && false {\n",
	},
	{
		file: "memory/library_allreduce.go", why: "the library is asked after the memory was closed", tests: inSuite,
		old: "\t\terr := m.Closed()\n",
		new: "\t\tvar err error\n",
	},
	{
		file: "memory/library_allreduce.go", why: "the library is given memory that was freed while the call waited", tests: inSuite,
		old: "\t\t\terr = cmp.Or(err, p.Window.Err())\n",
		new: "\t\t\t_ = cmp.Or(err, p.Window.Err())\n",
	},
	{
		file: "memory/heap.go", why: "an allocation of a heap has the number of the heap", tests: inSuite,
		old: "return 1<<63 | heap<<32 | request&math.MaxUint32 }",
		new: "return heap + 1 | request<<32 }",
	},
	{
		file: "memory/memory.go", why: "heaps whose memory was freed are compared on", tests: inSuite,
		old: "\t\tm.heaps = slices.DeleteFunc(m.heaps, func(other *Heap) bool { return other == h })\n",
		new: "",
	},
	{
		file: "device/host/work.go", why: "a branch ends with a graph inside of it that ends its goroutine", tests: []stage{{"device/host", "Goexit", usual}},
		old: "s.step(depth) || depth > 0 {",
		new: "s.step(depth) {",
	},
	{
		file: "memory/memory.go", why: "graphs do not know that their memory was closed", tests: inSuite,
		old: "\tm.released.Store(true)\n",
		new: "",
	},
	{
		file: "memory/memory.go", why: "closing leaves the signals open", tests: inSuite,
		old: "\t\terr = errors.Join(err, (*s).close())\n",
		new: "\t\t_ = s\n",
	},
	{
		file: "memory/memory.go", why: "workspace is reported as a leak", tests: inSuite,
		old: "\t\tif !e.own {\n\t\t\tm.log.Warn",
		new: "\t\tif true {\n\t\t\tm.log.Warn",
	},
	{
		file: "memory/memory.go", why: "leaks are not reported", tests: inSuite,
		old: "\t\tif !e.own {\n\t\t\tm.log.Warn",
		new: "\t\tif false {\n\t\t\tm.log.Warn",
	},
	{
		file: "memory/memory.go", why: "workspace counts as the user's allocations", tests: inSuite,
		old: "\t\tif !e.own {\n\t\t\tn++",
		new: "\t\tif true {\n\t\t\tn++",
	},
	{
		file: "memory/memory.go", why: "a busy rank does not tell the others once its time is up", tests: inSuite,
		old: "\t\tctx, failure = within, busy\n",
		new: "\t\t_, failure = within, busy\n",
	},
	{
		file: "memory/memory.go", why: "memory is unmapped while a peer's library still writes it", tests: inSuite,
		old: "\tif behind && busy == nil && err != nil && !alone && !onlyBroken(err) {",
		new: "\tif behind && busy == nil && err != nil && !alone && false {",
	},
	{
		file: "memory/memory.go", why: "memory is kept for a peer that is lost", tests: with(inSuite, nixlTests, kills),
		old: "\tif behind && busy == nil && err != nil && !alone && !onlyBroken(err) {",
		new: "\tif behind && busy == nil && err != nil && (!alone || true) {",
	},
	{
		file: "memory/memory.go", why: "entries are not sorted", tests: inSuite,
		old: "\tm.entries = slices.Insert(m.entries, i, e)\n",
		new: "\t_ = i\n\tm.entries = append(m.entries, e)\n",
	},
	{
		file: "memory/memory.go", why: "streams of other devices", tests: inSuite,
		old: "\tif d := s.Device(); d != m.device {",
		new: "\tif d := s.Device(); false {",
	},
	{
		file: "memory/memory.go", why: "a memory that Close kept is not busy", tests: inSuite,
		old: "m.again.Load() }",
		new: "false }",
	},
	{
		file: "memory/record.go", why: "ranks do not compare: backend", tests: inSuite,
		old: "\t{\"backend\", func",
		new: "\t// {\"backend\", func",
	},
	{
		file: "memory/record.go", why: "ranks do not compare: name", tests: inSuite,
		old: "\t{\"name or purpose\", func",
		new: "\t// {\"name or purpose\", func",
	},
	{
		file: "memory/record.go", why: "ranks do not compare: dtype", tests: inSuite,
		old: "\t{\"dtype\", func",
		new: "\t// {\"dtype\", func",
	},
	{
		file: "memory/record.go", why: "ranks do not compare: shape", tests: inSuite,
		old: "\t{\"shape\", func",
		new: "\t// {\"shape\", func",
	},
	{
		file: "memory/record.go", why: "ranks do not compare: size", tests: inSuite,
		old: "\t{\"size in bytes\", func",
		new: "\t// {\"size in bytes\", func",
	},
	{
		file: "memory/record.go", why: "ranks do not compare: rounded size", tests: inSuite,
		old: "\t{\"rounded size in bytes\", func",
		new: "\t// {\"rounded size in bytes\", func",
	},
	{
		file: "memory/record.go", why: "ranks do not compare: offset", tests: inSuite,
		old: "\t{\"offset in the allocation in bytes\", func",
		new: "\t// {\"offset in the allocation in bytes\", func",
	},
	{
		file: "memory/record.go", why: "ranks do not compare: mapped", tests: inSuite,
		old: "\t{\"whether the allocation is mapped already\", func",
		new: "\t// {\"whether the allocation is mapped already\", func",
	},
	{
		file: "memory/record.go", why: "a rank that fails does not tell the others", tests: inSuite,
		old: "\t\tmine.Failure, mine.Conditions = errs.Text(failure), errs.Codes(failure)\n",
		new: "",
	},
	{
		file: "memory/record.go", why: "a rank that fails does not tell of the condition", tests: with(inSuite, memoryTests),
		old: "mine.Failure, mine.Conditions = errs.Text(failure), errs.Codes(failure)",
		new: "mine.Failure = errs.Text(failure)",
	},
	{
		file: "backend/tell.go", why: "a rank that fails does not tell of the condition", tests: []stage{memoryTests},
		old: ", Conditions: errs.Codes(failure)}",
		new: "}",
	},
	{
		file: "memory/memory.go", why: "a rank that could not give memory back does not say so to those that go on", tests: []stage{memoryTests},
		old: "\t\tm.group.Excuse(fmt.Errorf(\"freeing %d bytes at %s: %w\", a.Bytes(), a.Ptr(), own))\n",
		new: "",
	},
	{
		file: "group/member.go", why: "a rank that may open no file takes itself for one of another host", tests: []stage{systemCalls},
		old: "\t\treturn \"\", err\n",
		new: "\t\treturn \"\", nil\n",
	},
	{
		file: "backend/host/memory_linux.go", why: "what the system refuses once is refused for ever", tests: []stage{systemCalls},
		old: "var works atomic.Bool\n\n// supported tries what the backend needs, until it has succeeded once: a system without memory or files now may have some later.\nfunc supported() error {\n",
		new: "var works atomic.Bool\n\nvar refused error\n\nfunc supported() (err error) {\n\tif refused != nil {\n\t\treturn refused\n\t}\n\tdefer func() { refused = err }()\n",
	},
	{
		file: "backend/host/memory_linux.go", why: "addresses stay reserved where a rank's memory cannot be mapped", tests: []stage{systemCalls},
		old: "fmt.Errorf(\"memory of rank %d: %w\", r, err), unix.MunmapPtr(base, uintptr(total)))",
		new: "fmt.Errorf(\"memory of rank %d: %w\", r, err))",
	},
	{
		file: "backend/host/memory_linux.go", why: "the others' files stay open", tests: []stage{systemCalls},
		old: "\t\tif f != nil {\n\t\t\terr = errors.Join(err, f.Close())\n",
		new: "\t\tif f != nil && err == nil {\n\t\t\terr = errors.Join(err, f.Close())\n",
	},
	{
		file: "backend/nvshmem/world.go", why: "a rank that fails in a turn does not vote", tests: []stage{turnTests},
		old: "\t} else if err == nil { // it is a matter of the book",
		new: "\t} else if run(func(uint64, []ask) error { return nil }); err != nil {\n\t\treturn err\n\t} else { // it is a matter of the book",
	},
	{
		file: "backend/nvshmem/collective.go", why: "NVSHMEM goes on after a reduction that one rank could not enqueue", tests: []stage{turnTests},
		old: "\t\terr = p.backend.world.breakUp(onlySome(err))\n",
		new: "\t\terr = onlySome(err)\n",
	},
	{
		file: "group/group.go", why: "a vote does not tell of the condition", tests: []stage{conditionTests},
		old: "errs.Codes(local), nil",
		new: "nil, nil",
	},
	{
		file: "group/group.go", why: "an excuse does not tell of the condition", tests: []stage{conditionTests},
		old: "errs.Codes(excuse)",
		new: "nil",
	},
	{
		file: "group/hub.go", why: "an old excuse is told as the condition of a vote", tests: []stage{conditionTests},
		old: "rankFailure{rank, a.refusal, a.conditions}",
		new: "rankFailure{rank, a.refusal, append(a.conditions, a.excuseConditions...)}",
	},
	{
		file: "group/remote.go", why: "conditions of excuses do not travel", tests: []stage{conditionTests},
		old: "Conditions: a.conditions, ExcuseConditions: a.excuseConditions,",
		new: "Conditions: a.conditions,",
	},
	{
		file: "group/frames.go", why: "conditions are not told over the network", tests: []stage{conditionTests},
		old: ", Conditions: one.conditions}",
		new: "}",
	},
	{
		file: "internal/errs/codes.go", why: "two conditions change places with an unknown one", tests: []stage{conditionTests},
		old: "if code > 0 && uint64(code) < uint64(len(conditions)) {",
		new: "if code > 0 {\n\t\t\tcode %= uint32(len(conditions))",
	},
	{
		file: "config/resolve.go", why: "the zero Config is the default", tests: []stage{openTests},
		old: "return Load(&LoadOptions{Environ: environ})",
		new: "return Default(), nil",
	},
	{
		file: "config/resolve.go", why: "the launcher's socket is not taken", tests: []stage{openTests},
		old: "c.RendezvousFD, taken[\"rendezvous-fd\"] = fd, Source{Env: name}",
		new: "_ = fd",
	},
	{
		file: "open.go", why: "variables of options reach a backend behind a Config", tests: []stage{openTests},
		old: "Getenv: withoutOptions(opts.getenv())",
		new: "Getenv: opts.getenv()",
	},
	{
		file: "config/resolve.go", why: "a Config leaves no library to its variable", tests: []stage{openTests},
		old: "d.Name == options.Library &&",
		new: "d.Name == \"none\" &&",
	},
	{
		file: "group/group.go", why: "rank 0 returns an agreed failure before the others are told", tests: []stage{exitTests},
		old: "\t\tg.session.transport.flush()\n",
		new: "",
	},
	{
		file: "memory/record.go", why: "what a failed rank brought is held for a mismatch", tests: inSuite,
		old: "\tif len(vote.Failures) > 0 {\n\t\treturn nil, vote\n\t}\n\tif _, differ",
		new: "\tif _, differ",
	},
	{
		file: "memory/window.go", why: "offsets beyond a window", tests: inSuite,
		old: "\tif offset < 0 || offset > w.Bytes() {",
		new: "\tif offset < 0 {",
	},
	{
		file: "memory/window.go", why: "peer pointers without the offset", tests: inSuite,
		old: "\treturn p.Add(offset), nil\n",
		new: "\treturn p, nil\n",
	},
	{
		file: "memory/window.go", why: "the contiguous view without the offset", tests: inSuite,
		old: "\treturn base.Add(offset), stride, nil",
		new: "\treturn base, stride, nil",
	},
	{
		file: "memory/window.go", why: "a rank too many", tests: inSuite,
		old: "\tif rank < 0 || rank >= m.group.Size() {",
		new: "\tif rank < 0 || rank > m.group.Size() {",
	},
	// That a block has no more bytes than its window is not in the list: what follows refuses it as well, since no offset is left for
	// it, and only the argument that the error names differs.
	{
		file: "memory/transfer.go", why: "blocks beyond their window", tests: inSuite,
		old: "b.Offset < 0 || b.Offset > b.Window.Bytes()-b.Bytes",
		new: "b.Offset < 0",
	},
	{
		file: "memory/memory.go", why: "blocks beyond their local allocation", tests: inSuite,
		old: "\tif left := end - off; bytes > left {",
		new: "\tif left := end; bytes-0*off > left {",
	},
	{
		file: "memory/transfer.go", why: "windows of another group", tests: inSuite,
		old: "\tcase b.Window.memory != m:",
		new: "\tcase false:",
	},
	{
		file: "memory/transfer.go", why: "windows that were closed", tests: inSuite,
		old: "\tcase b.Window.Err() != nil:",
		new: "\tcase false:",
	},
	{
		file: "memory/transfer.go", why: "a transfer under way is posted again", tests: inSuite,
		old: "\tif t.refresh(); t.state == TransferInProgress {\n\t\treturn fmt.Errorf(\"posting",
		new: "\tif t.refresh(); false {\n\t\treturn fmt.Errorf(\"posting",
	},
	{
		file: "memory/transfer.go", why: "a transfer under way is closed", tests: inSuite,
		old: "\tif t.refresh(); t.posting || t.state == TransferInProgress {\n\t\treturn fmt.Errorf(\"closing",
		new: "\tif t.refresh(); false {\n\t\treturn fmt.Errorf(\"closing",
	},
	{
		file: "memory/transfer.go", why: "a recorded post counts as one under way", tests: inSuite,
		old: "\tcaptured := s.Capturing()\n",
		new: "\tcaptured := false\n",
	},
	{
		file: "memory/transfer.go", why: "prepared reads write", tests: inSuite,
		old: "\t\tcase op == backend.Write:\n\t\t\tc.copies = append",
		new: "\t\tcase op == backend.Read:\n\t\t\tc.copies = append",
	},
	{
		file: "memory/transfer.go", why: "only the first block of a transfer moves", tests: inSuite,
		old: "\tfor _, b := range c.copies {\n\t\tif err := s.Copy",
		new: "\tfor _, b := range c.copies[:min(len(c.copies), 1)] {\n\t\tif err := s.Copy",
	},
	{
		file: "memory/transfer.go", why: "the end of a transfer is not recorded", tests: inSuite,
		old: "\treturn begun, c.mark(s)\n",
		new: "\treturn begun, nil\n",
	},
	{
		file: "backend/nccl/puts.go", why: "work of the CPU waits for an abort", tests: []stage{{"backend/nccl", "TestPutFails", usual}},
		old: "\t\tb.giveUpBeside(p.red, err)\n",
		new: "\t\terr = b.runFailed(p.red, err)\n",
	},
	{
		file: "memory/transfer.go", why: "streams do not wait for transfers", tests: inSuite,
		old: "\treturn s.WaitEvent(p.ended)\n",
		new: "\treturn nil\n",
	},
	{
		file: "memory/transfer.go", why: "a transfer that was enqueued with no event behind it is not under way", tests: []stage{memoryTests},
		old: "\t\tif !begun || captured {\n",
		new: "\t\tif begun || captured || err != nil {\n",
	},
	{
		file: "memory/transfer.go", why: "the error of a library's transfer is lost", tests: inSuite,
		old: "\treturn true, t.err\n}\n\n// PutSignal",
		new: "\treturn true, nil\n}\n\n// PutSignal",
	},
	{
		file: "memory/transfer.go", why: "copies beyond a window", tests: inSuite,
		old: "bytes < 0 || offset < 0 || bytes > w.Bytes()-offset",
		new: "bytes < 0 || offset < 0",
	},
	{
		file: "memory/transfer.go", why: "gets put", tests: inSuite,
		old: "\tif op == backend.Read {\n\t\tto, from",
		new: "\tif op == 0 {\n\t\tto, from",
	},
	{
		file: "memory/transfer.go", why: "copies to closed windows", tests: inSuite,
		old: "\tif err := errors.Join(m.Err(), w.Err()); err != nil {\n\t\treturn fmt.Errorf(\"%s: %w\", call, err)\n\t}\n",
		new: "",
	},
	{
		file: "memory/transfer.go", why: "transfers that neither read nor write", tests: inSuite,
		old: "\tif op != backend.Read && op != backend.Write {\n\t\treturn nil,",
		new: "\tif false {\n\t\treturn nil,",
	},
	{
		file: "memory/transfer.go", why: "transfers with ranks that do not exist", tests: inSuite,
		old: "\tif err := m.checkRank(name, peer); err != nil {\n\t\treturn nil, err\n\t}\n",
		new: "",
	},
	{
		file: "memory/transfer.go", why: "transfers of no blocks", tests: inSuite,
		old: "\tif len(blocks) == 0 {",
		new: "\tif false {",
	},
	{
		file: "memory/transfer.go", why: "transfers of a closed memory are prepared", tests: inSuite,
		old: "\tif err := m.Err(); err != nil {\n\t\treturn nil, fmt.Errorf(\"preparing a transfer: %w\", err)\n\t}\n",
		new: "",
	},
	{
		file: "memory/transfer.go", why: "blocks of less than nothing", tests: inSuite,
		old: "b.Bytes < 0 || b.Bytes > b.Window.Bytes()",
		new: "b.Bytes > b.Window.Bytes()",
	},
	{
		file: "memory/transfer.go", why: "blocks before their window", tests: inSuite,
		old: "b.Offset < 0 || b.Offset > b.Window.Bytes()-b.Bytes",
		new: "b.Offset > b.Window.Bytes()-b.Bytes",
	},
	{
		file: "memory/transfer.go", why: "transfers do not look whether the remote side was freed", tests: inSuite,
		old: "addSide(addSide(sides, e, arg, \"local\"), b.Window.entry, arg, \"remote\")",
		new: "addSide(sides, e, arg, \"local\")",
	},
	{
		file: "memory/transfer.go", why: "transfers do not look whether the local side was freed", tests: inSuite,
		old: "addSide(addSide(sides, e, arg, \"local\"), b.Window.entry, arg, \"remote\")",
		new: "addSide(sides, b.Window.entry, arg, \"remote\")\n\t\t_ = e",
	},
	{
		file: "memory/transfer.go", why: "transfers are posted to another device's stream", tests: inSuite,
		old: "\tif err := t.memory.checkStream(\"Post\", s); err != nil {\n\t\treturn err\n\t}\n",
		new: "",
	},
	{
		file: "memory/transfer.go", why: "closed transfers are posted", tests: inSuite,
		old: "\tif err := t.usable(); err != nil {\n\t\treturn fmt.Errorf(\"posting a transfer: %w\", err)\n\t}\n",
		new: "",
	},
	{
		file: "memory/transfer.go", why: "transfers are posted while their memory is freed", tests: inSuite,
		old: "\tif err := useSides(t.sides); err != nil {\n\t\treturn fmt.Errorf(\"posting a transfer: %w\", err)\n\t}\n\tdefer unuseSides(t.sides)\n",
		new: "",
	},
	{
		file: "memory/transfer.go", why: "a post never ends as far as its memory knows", tests: inSuite,
		old: "\tdefer unuseSides(t.sides)\n",
		new: "",
	},
	{
		file: "memory/transfer.go", why: "a post that was refused uses its memory for ever", tests: inSuite,
		old: "\t\t\tunuseSides(sides[:i])\n",
		new: "\t\t\t_ = i\n",
	},
	{
		file: "memory/transfer.go", why: "another device's stream waits for transfers", tests: inSuite,
		old: "\tif err := t.memory.checkStream(\"WaitOn\", s); err != nil {\n\t\treturn err\n\t}\n",
		new: "",
	},
	{
		file: "memory/transfer.go", why: "streams wait for transfers that were never posted", tests: inSuite,
		old: "\tasked := t.posted()\n",
		new: "\tvar asked error\n",
	},
	{
		file: "memory/transfer.go", why: "closed transfers have a state", tests: inSuite,
		old: "\tif t.closed {\n\t\treturn 0,",
		new: "\tif false {\n\t\treturn 0,",
	},
	{
		file: "memory/transfer.go", why: "Wait waits for what was never posted", tests: inSuite,
		old: "\terr := t.posted()\n",
		new: "\tvar err error\n",
	},
	{
		file: "memory/transfer.go", why: "Wait waits for posts in graphs", tests: inSuite,
		old: "\tif err == nil && t.captured {",
		new: "\tif false {",
	},
	{
		file: "memory/transfer.go", why: "Wait does not tell how a transfer ended", tests: inSuite,
		old: "\tt.refresh()\n\treturn t.err\n",
		new: "\tt.refresh()\n\treturn nil\n",
	},
	{
		file: "memory/transfer.go", why: "transfers are closed twice", tests: inSuite,
		old: "\tif t.closed {\n\t\treturn fmt.Errorf(\"closing a transfer",
		new: "\tif false {\n\t\treturn fmt.Errorf(\"closing a transfer",
	},
	{
		file: "memory/transfer.go", why: "closed transfers are not released", tests: inSuite,
		old: "\tt.closed = true\n\treturn t.prepared.Close()\n",
		new: "\tt.closed = true\n\treturn nil\n",
	},
	{
		file: "memory/transfer.go", why: "a library's transfer without an event is not released", tests: inSuite,
		old: "\t\t\terr = errors.Join(err, t.prepared.Close())\n",
		new: "",
	},
	{
		file: "memory/transfer.go", why: "graphs move freed memory by a library", tests: inSuite,
		old: "\tif err := freedSides(t.sides); err != nil {\n\t\treturn nil, err",
		new: "\tif err := freedSides(nil); err != nil {\n\t\treturn nil, err",
	},
	{
		file: "memory/transfer.go", why: "graphs start a library's transfer that was closed", tests: inSuite,
		old: "\tif t.closed {\n\t\treturn nil, fmt.Errorf(\"transfer: %w\"",
		new: "\tif false {\n\t\treturn nil, fmt.Errorf(\"transfer: %w\"",
	},
	{
		file: "memory/transfer.go", why: "copies on another device's stream", tests: inSuite,
		old: "\tcall := callOf(op)\n\tif err := m.checkStream(call, s); err != nil {\n\t\treturn err\n\t}\n",
		new: "\tcall := callOf(op)\n",
	},
	{
		file: "memory/transfer.go", why: "copies in no direction", tests: inSuite,
		old: "\tif op != backend.Read && op != backend.Write {\n\t\treturn errs.Invalid(\"Copy\"",
		new: "\tif false {\n\t\treturn errs.Invalid(\"Copy\"",
	},
	{
		file: "memory/transfer.go", why: "copies to no window", tests: inSuite,
		old: "\tif w == nil {\n\t\treturn errs.Invalid(call",
		new: "\tif false {\n\t\treturn errs.Invalid(call",
	},
	{
		file: "memory/transfer.go", why: "copies to another memory's window", tests: inSuite,
		old: "\tif w.memory != m {\n\t\treturn errs.Invalid(call",
		new: "\tif false {\n\t\treturn errs.Invalid(call",
	},
	{
		file: "memory/transfer.go", why: "empty copies to ranks that do not exist", tests: inSuite,
		old: "\t\treturn m.checkRank(call, peer)\n",
		new: "\t\treturn nil\n",
	},
	// That copies are to ranks that exist is not in the list: the window, or the backend that is asked to prepare the copy, refuses others as
	// well.
	{
		file: "memory/transfer.go", why: "copies while their memory is freed", tests: inSuite,
		old: "\tif err := useSides(sides[:]); err != nil {\n\t\treturn fmt.Errorf(\"%s: %w\", call, err)\n\t}\n\tdefer unuseSides(sides[:])\n",
		new: "\t_ = sides\n",
	},
	{
		file: "memory/transfer.go", why: "a copy never ends as far as its memory knows", tests: inSuite,
		old: "\tdefer unuseSides(sides[:])\n",
		new: "",
	},
	{
		file: "memory/copies.go", why: "prepared copies are mistaken for others", tests: inSuite,
		old: "\t\tif p.key == key && p.local == local {",
		new: "\t\tif p.key.bytes == key.bytes && p.key.op == key.op {",
	},
	{
		file: "memory/copies.go", why: "what a graph has recorded is used by others", tests: inSuite,
		old: "\tif p.recorded {\n\t\treturn nil\n\t}\n",
		new: "",
	},
	{
		file: "memory/copies.go", why: "a copy that failed is never given back", tests: inSuite,
		old: "\tif ended || err != nil {\n\t\tp.mu.Lock()\n\t\tp.following",
		new: "\tif ended {\n\t\tp.mu.Lock()\n\t\tp.following",
	},
	{
		file: "memory/copies.go", why: "a graph copies where memory was freed", tests: []stage{memoryTests},
		old: "\treturn host && s.Capturing()\n",
		new: "\treturn host && s == nil\n",
	},
	{
		file: "memory/copies.go", why: "a put that has failed is signalled", tests: []stage{nixlTests},
		old: "\t\tif follows = ended && err == nil; follows {\n\t\t\tfollows, err = p.follow()\n",
		new: "\t\tif follows = ended || err != nil; follows {\n\t\t\tfollows, err = p.follow()\n",
	},
	{
		file: "memory/send.go", why: "a send does not signal", tests: inPlans,
		old: "\n\treturn p.signals.SignalAll(s, p.channel)\n",
		new: "\n\treturn nil\n",
	},
	{
		file: "memory/send.go", why: "a send of the CPU does not signal", tests: inPlans,
		old: "(*hostSend)(p)); err != nil || p.silent {\n\t\t\treturn err\n\t\t}\n\t\treturn p.signals.SignalAll(s, p.channel)\n",
		new: "(*hostSend)(p)); err != nil {\n\t\t\treturn err\n\t\t}\n\t\treturn nil\n",
	},
	{
		file: "memory/send.go", why: "the CPU copies to peers when the plan has failed", tests: inPlans,
		old: "\tif user.failedBefore() {\n\t\treturn nil\n\t}\n\treturned := false",
		new: "\treturned := false",
	},
	{
		file: "memory/send.go", why: "a send signals before it puts", tests: inPlans,
		old: "\tfor _, c := range p.copies {\n\t\tif err := s.Copy(c.Dst, c.Src, c.Bytes); err != nil {\n\t\t\treturn err\n\t\t}\n\t}\n\tif p.silent {\n\t\treturn nil\n\t}\n\treturn p.signals.SignalAll(s, p.channel)",
		new: "\tif err := p.signals.SignalAll(s, p.channel); err != nil {\n\t\treturn err\n\t}\n\tfor _, c := range p.copies {\n\t\tif err := s.Copy(c.Dst, c.Src, c.Bytes); err != nil {\n\t\t\treturn err\n\t\t}\n\t}\n\treturn nil",
	},
	{
		file: "memory/send.go", why: "a send over a library signals without waiting for its put", tests: inPlans,
		old: "\tif part.sent = part.put == nil; part.sent {\n\t\tw.signal(part)\n\t\treturn\n\t}\n\trun, err := part.put.Start()\n\tif part.run = run; err != nil {\n\t\tw.fail(part, err)\n\t}",
		new: "\tw.signal(part)\n\tif part.put != nil {\n\t\t_, _ = part.put.Start()\n\t}",
	},
	{
		file: "memory/send.go", why: "sends into a workspace go to the beginning of its block", tests: inPlans,
		old: "b.Window, b.Offset = p.workspace.block.window, p.workspace.span.start+b.Offset",
		new: "b.Window = p.workspace.block.window",
	},
	{
		file: "memory/send.go", why: "a plan that has failed goes on sending", tests: inSends,
		old: "\tif w.user.failedBefore() {\n\t\treturn w.left(), nil\n\t}\n",
		new: "",
	},
	{
		file: "memory/send.go", why: "two puts to one peer", tests: inSends,
		old: "\tif taken[put.Peer] {",
		new: "\tif false {",
	},
	{
		file: "memory/send.go", why: "a plan that has failed goes on with the copies of a graph", tests: inSends,
		old: "\tif user.failedBefore() {\n\t\treturn nil\n\t}\n\treturned :=",
		new: "\treturned :=",
	},
	{
		file: "memory/send.go", why: "graphs copy from and to freed memory", tests: inSends,
		old: "\t\tif err := freedSides(t.sides); err != nil {\n",
		new: "\t\tif err := freedSides(nil); err != nil {\n",
	},
	{
		file: "memory/send.go", why: "a send that was cut off is not told", tests: inSends,
		old: "\t\tw.user.failLater(errs.ErrInProgress)\n",
		new: "",
	},
	{
		file: "memory/send.go", why: "a send that the stream gave up is not told", tests: inSends,
		old: "\nfunc (w *sendWork) Failed(err error) { w.user.failLater(err) }",
		new: "\nfunc (w *sendWork) Failed(err error) {}",
	},
	{
		file: "memory/send.go", why: "a put of a send that fails is not told", tests: inSends,
		old: "\tw.user.failLater(err)\n\tpart.run = nil\n",
		new: "\tpart.run = nil\n",
	},
	{
		file: "memory/signal_plan.go", why: "sends on channels that do not exist", tests: inSends,
		old: "\tif channel < 0 || channel >= p.user.Channels {",
		new: "\tif channel < 0 {",
	},
	{
		file: "memory/send.go", why: "sends put to the own rank", tests: inSends,
		old: "\tif put.Peer == p.memory.group.Rank() {",
		new: "\tif false {",
	},
	{
		file: "memory/send.go", why: "sends into a closed workspace", tests: inSends,
		old: "\t\tif p.workspace.closed.Load() {",
		new: "\t\tif false {",
	},
	{
		file: "memory/send.go", why: "sends behind their workspace", tests: inSends,
		old: "\t\tif b.Offset < 0 || b.Bytes > p.workspace.Bytes()-b.Offset {",
		new: "\t\tif b.Offset < 0 {",
	},
	{
		file: "memory/send.go", why: "sends before their workspace", tests: inSends,
		old: "\t\tif b.Offset < 0 || b.Bytes > p.workspace.Bytes()-b.Offset {",
		new: "\t\tif b.Bytes > p.workspace.Bytes()-b.Offset {",
	},
	{
		file: "memory/send.go", why: "a send that is refused leaves transfers open", tests: inSends,
		old: "\t\t\terr = errors.Join(err, send.Close())\n",
		new: "",
	},
	{
		file: "memory/send.go", why: "closed sends leave transfers open", tests: inSends,
		old: "\t\terr = errors.Join(err, t.Close())\n",
		new: "\t\t_ = t\n",
	},
	{
		file: "memory/workspace.go", why: "channels overlap", tests: inSends,
		old: "\t\t\tb.free[i] = span{s.start + bytes, s.bytes - bytes}\n",
		new: "\t\t\tb.free[i] = span{s.start, s.bytes - bytes}\n",
	},
	{
		file: "memory/workspace.go", why: "free workspace is not joined with what is behind it", tests: inSends,
		old: "b.free[i].start+b.free[i].bytes == b.free[i+1].start",
		new: "false",
	},
	{
		file: "memory/workspace.go", why: "workspaces are not cleared", tests: inSends,
		old: "\t\terr = zero(context.WithoutCancel(ctx), m.device, p, w.span.bytes)\n",
		new: "\t\t_ = p\n",
	},
	{
		file: "memory/workspace.go", why: "ranks do not vote whether a workspace is clear", tests: inSends,
		old: "\tif err := m.group.Vote(group.Heard(ctx), \"clearing a workspace\", err); err != nil {",
		new: "\tif err != nil {",
	},
	{
		file: "memory/workspace.go", why: "a workspace is closed while peers use it", tests: inSends,
		old: "\tbusy, err := m.quiesce(ctx, w.closing(), false, gaveUp, w.given.Store)\n",
		new: "\tvar busy, err error\n",
	},
	{
		file: "memory/workspace.go", why: "workspaces are not aligned", tests: inSends,
		old: "\tneed := (bytes + workspaceAlign - 1) / workspaceAlign * workspaceAlign\n",
		new: "\tneed := bytes\n",
	},
	{
		file: "memory/workspace.go", why: "workspace in use is given back", tests: inSends,
		old: "len(b.free) == 1 && b.free[0] == span{0, b.alloc.Bytes()}",
		new: "len(b.free) == 1",
	},
	{
		file: "memory/workspace.go", why: "all workspaces begin where their block does", tests: inSends,
		old: "\treturn w.block.window.Peer(rank, w.span.start)\n}",
		new: "\treturn w.block.window.Peer(rank, 0)\n}",
	},
	{
		file: "memory/workspace.go", why: "ranks do not vote whether all have workspace", tests: inSends,
		old: "\tif voteErr := m.group.Vote(ctx, \"workspace\", err); voteErr != nil {",
		new: "\tif voteErr := err; voteErr != nil {",
	},
	{
		file: "memory/workspace.go", why: "a workspace is closed twice", tests: inSends,
		old: "\tif w.closed.Swap(true) {\n",
		new: "\tif w.closed.Store(true); false {\n",
	},
	{
		file: "memory/workspace.go", why: "a closed workspace has addresses", tests: inSends,
		old: "\tif w.closed.Load() {\n\t\treturn 0,",
		new: "\tif false {\n\t\treturn 0,",
	},
	{
		file: "memory/workspace.go", why: "graphs are not told that a workspace was closed", tests: inSends,
		old: "gaveUp, w.given.Store)",
		new: "gaveUp, func(bool) {})",
	},
	{
		file: "memory/workspace.go", why: "a workspace that is still in use counts as given back", tests: inSends,
		old: "\tbusy, err := m.quiesce(ctx, w.closing(), false, gaveUp, w.given.Store)\n",
		new: "\tw.given.Store(true)\n\tbusy, err := m.quiesce(ctx, w.closing(), false, gaveUp, w.given.Store)\n",
	},
	{
		file: "memory/workspace.go", why: "graphs are not told that a workspace went with its memory", tests: inSends,
		old: "\treturn w.block.window.Err()\n",
		new: "\treturn nil\n",
	},
	{
		file: "memory/workspace.go", why: "workspaces of 0 bytes", tests: inSends,
		old: "\tif bytes <= 0 || bytes > maxWorkspaceBytes {",
		new: "\tif bytes < 0 || bytes > maxWorkspaceBytes {",
	},
	{
		file: "memory/workspace.go", why: "workspaces beyond what any plan needs", tests: inSends,
		old: "\tif bytes <= 0 || bytes > maxWorkspaceBytes {",
		new: "\tif bytes <= 0 {",
	},
	{
		file: "memory/workspace.go", why: "workspaces of a closed memory", tests: inSends,
		old: "\tif failure == nil {\n\t\tfailure = m.Err()\n\t}\n\trecords",
		new: "\trecords",
	},
	{
		file: "memory/workspace.go", why: "the failure that a rank brings to a workspace is not told", tests: inSends,
		old: "\tfailure := r.Failure\n",
		new: "\tvar failure error\n",
	},
	{
		file: "memory/workspace.go", why: "the error of a workspace's size is lost", tests: inSends,
		old: "\t\tif bytes, err = r.Size(offers); err == nil {",
		new: "\t\tif bytes, _ = r.Size(offers); err == nil {",
	},
	{
		file: "memory/workspace.go", why: "a workspace's size is not made from the offers", tests: inSends,
		old: "\t\tif bytes, err = r.Size(offers); err == nil {",
		new: "\t\tif _ = offers; err == nil {",
	},
	{
		file: "memory/workspace.go", why: "offers do not come to the other ranks", tests: inSends,
		old: "WorkspaceOffer{r.DeviceUUID, r.Offer}",
		new: "WorkspaceOffer{Device: r.DeviceUUID}",
	},
	{
		file: "memory/workspace.go", why: "ranks do not compare what a workspace is for", tests: inSends,
		old: "m.record(workspaceKind, r.Purpose,",
		new: "m.record(\"workspace\", \"\",",
	},
	{
		file: "memory/workspace.go", why: "ranks do not compare how large a workspace is", tests: inSends,
		old: "&Record{Bytes: r.Bytes, Offer: r.Offer, Taken: m.workspace.taken()}",
		new: "&Record{Offer: r.Offer, Taken: m.workspace.taken()}",
	},
	{
		file: "memory/workspace.go", why: "ranks do not compare what is taken of their workspaces", tests: inSends,
		old: "&Record{Bytes: r.Bytes, Offer: r.Offer, Taken: m.workspace.taken()}",
		new: "&Record{Bytes: r.Bytes, Offer: r.Offer}",
	},
	{
		file: "memory/workspace.go", why: "all ranks seem to share one device", tests: with(onFakes, inSends...),
		old: "\t\tfor _, r := range records {\n\t\t\tm.devices = append(m.devices, r.DeviceUUID)",
		new: "\t\tfor range records {\n\t\t\tm.devices = append(m.devices, m.device.UUID())",
	},
	{
		file: "memory/workspace.go", why: "workspace that another rank could not allocate is not released", tests: inSends,
		old: "\t\t\terr = alloc.Release(context.WithoutCancel(ctx))\n",
		new: "",
	},
	{
		file: "memory/workspace.go", why: "workspace that could not be mapped is not forgotten", tests: inSends,
		old: "\t\tm.remove(alloc, false)\n",
		new: "",
	},
	{
		file: "memory/workspace.go", why: "workspace that could not be mapped is not released", tests: inSends,
		old: "errors.Join(noWorkspace(bytes, err), alloc.Release(context.WithoutCancel(ctx)))",
		new: "noWorkspace(bytes, err)",
	},
	{
		file: "memory/workspace.go", why: "free workspace is not joined with what is before it", tests: inSends,
		old: "b.free[i-1].start+b.free[i-1].bytes == b.free[i].start",
		new: "false",
	},
	{
		file: "memory/workspace.go", why: "workspace is trimmed after the memory was closed", tests: inSends,
		old: "\tif m.closed.Load() {\n\t\treturn nil // it went with the memory\n\t}\n\tvar err error\n",
		new: "\tvar err error\n",
	},
	{
		file: "memory/workspace.go", why: "a workspace is closed after its memory", tests: inSends,
		old: "\tif m.closed.Load() {\n\t\treturn nil // it went with the memory\n\t}\n\tbusy",
		new: "\tbusy",
	},
	{
		file: "memory/workspace.go", why: "small blocks of workspace are given back", tests: inSends,
		old: "b.alloc.Bytes() <= keptWorkspace || !b.unused()",
		new: "!b.unused()",
	},
	{
		file: "memory/workspace.go", why: "nobody waits until workspace is clear", tests: inSends,
		old: "errors.Join(s.Fill(p, 0, bytes), s.Synchronize(ctx), s.Close())",
		new: "errors.Join(s.Fill(p, 0, bytes), s.Close())",
	},
	{
		file: "memory/workspace.go", why: "each small workspace is a block of its own", tests: inSends,
		old: "max(need, workspaceBlock)",
		new: "need",
	},
	{
		file: "memory/workspace.go", why: "a workspace is taken while another collective call is under way", tests: inSends,
		old: "return inTurn(ctx, &m.collective, \"taking",
		new: "return inTurn(ctx, new(turn), \"taking",
	},
	{
		file: "memory/workspace.go", why: "a workspace is closed while another collective call is under way", tests: inSends,
		old: "return w.memory.collective.do(ctx, \"closing",
		new: "return new(turn).do(ctx, \"closing",
	},
	{
		file: "memory/workspace.go", why: "workspace is trimmed while another collective call is under way", tests: inSends,
		old: "return m.collective.do(ctx, \"trimming",
		new: "return new(turn).do(ctx, \"trimming",
	},
	{
		file: "memory/multicast.go", why: "multicast is enabled while another collective call is under way", tests: inSuite,
		old: "err := m.collective.do(ctx, \"multicast\"",
		new: "err := new(turn).do(ctx, \"multicast\"",
	},
	{
		file: "memory/multicast.go", why: "ranks do not agree on multicast", tests: inSuite,
		old: "\t_, err := m.exchange(group.Heard(ctx), m.record(\"bytes\", purpose, &Record{}), failure)\n",
		new: "\t_ = purpose\n\terr := failure\n",
	},
	{
		file: "memory/multicast.go", why: "ranks do not compare which window they enable multicast for", tests: inSuite,
		old: "fmt.Sprintf(\"multicast of window %d\", w.number)",
		new: "\"multicast of a window\"",
	},
	{
		file: "memory/multicast.go", why: "ranks do not compare whether a window has multicast", tests: inSuite,
		old: "\t\t\tpurpose += \", which has it\"\n",
		new: "\t\t\tpurpose += \"\"\n",
	},
	{
		file: "memory/multicast.go", why: "the backend makes a window's multicast address again", tests: inSuite,
		old: "\tif !w.castAddress().IsNil() {\n\t\treturn nil\n\t}\n\tif c",
		new: "\tif c",
	},
	{
		file: "memory/multicast.go", why: "backends without multicast are asked for it", tests: inSuite,
		old: "\tif c := m.backend.Capabilities(); !c.Multicast {\n\t\treturn c.Missing(m",
		new: "\tif c := m.backend.Capabilities(); false {\n\t\treturn c.Missing(m",
	},
	{
		file: "memory/multicast.go", why: "empty windows have no multicast", tests: inSuite,
		old: "\t\treturn nil // an empty window needs none\n",
		new: "\t\t_ = 0 // an empty window needs none\n",
	},
	{
		file: "memory/multicast.go", why: "why multicast could not be enabled is forgotten", tests: inSuite,
		old: "\t\tw.noMulticast.Store(&err)\n",
		new: "",
	},
	{
		file: "memory/multicast.go", why: "multicast of another memory's window", tests: inSuite,
		old: "\tcase w.memory != m:\n",
		new: "\tcase false:\n",
	},
	{
		file: "memory/multicast.go", why: "multicast of a freed window", tests: inSuite,
		old: "\t\t\tfailure = w.Err()\n",
		new: "",
	},
	{
		file: "memory/multicast.go", why: "multicast of no window", tests: inSuite,
		old: "\tcase w == nil && failure == nil:\n",
		new: "\tcase false:\n",
	},
	{
		file: "memory/multicast.go", why: "multicast of a closed memory", tests: inSuite,
		old: "\tif failure == nil {\n\t\tfailure = m.Err()\n\t}\n\tpurpose",
		new: "\tpurpose",
	},
	{
		file: "memory/multicast.go", why: "multicast addresses without the offset", tests: inSuite,
		old: "\t\treturn p.Add(offset), nil\n",
		new: "\t\treturn p, nil\n",
	},
	{
		file: "memory/multicast.go", why: "multicast addresses of freed windows", tests: inSuite,
		old: "\tif err := w.check(\"Multicast\", offset); err != nil {",
		new: "\tif err := w.check(\"Multicast\", offset); false {\n\t\t_ = err",
	},
	{
		file: "memory/multicast.go", why: "an empty window has no multicast address, and not a nil one", tests: inSuite,
		old: "\tif w.mapping == nil {\n\t\treturn 0, nil\n\t}\n",
		new: "",
	},
	{
		file: "memory/library_allreduce.go", why: "a library's all-reduce beyond its allocation", tests: with(onFakes, ncclTests),
		old: "bytes > w.Bytes()-p.Offset:",
		new: "false:",
	},
	{
		file: "memory/library_allreduce.go", why: "a library's all-reduce at the beginning of its allocation", tests: with(onFakes, ncclTests),
		old: "c.In, c.InOffset, c.Out, c.OutOffset = in.Window.alloc, in.Offset, out.Window.alloc, out.Offset",
		new: "c.In, c.InOffset, c.Out, c.OutOffset = in.Window.alloc, 0, out.Window.alloc, out.Offset",
	},
	{
		file: "backend/nixl/meet.go", why: "libraries of several versions speak to each other", tests: []stage{nixlTests},
		old: "known != \"\" && p.Version != known",
		new: "known != \"\" && p.Version == \"\"",
	},
	{
		file: "group/islands_linux.go", why: "who receives nothing does not say why", tests: []stage{{"group", "Island", usual}},
		old: "if err := t.x.failed(); err != nil {",
		new: "if err := t.x.failed(); false {",
	},
	{
		file: "collective/program.go", why: "a graph after its tensor was closed is no error on a rank that has nothing to reduce",
		tests: []stage{{"tests", "TestMatrix/backend=isles/world=3/goroutines/lifetime/closed_plan_graph/hierarchical", usual}},
		old:   "\tw.guard()\n",
		new:   "",
	},
	{
		file: "backend/tell.go", why: "a rank that failed is not heard", tests: with(onFakes, ncclTests, nixlTests),
		old: "\tif len(vote.Failures) > 0 {\n\t\treturn nil, vote\n\t}\n",
		new: "",
	},
	{
		file: "tensor/tensor.go", why: "slices outlive what they are slices of", tests: inTensor,
		old: "; part = part.whole {\n\t\tif part.closed.Load() {",
		new: "; part = nil {\n\t\tif part.closed.Load() {",
	},
	{
		file: "tensor/tensor.go", why: "a closed slice can be used", tests: inTensor,
		old: "\t\tif part.closed.Load() {",
		new: "\t\tif part.whole == nil && part.closed.Load() {",
	},
	{
		file: "tensor/tensor.go", why: "ranks do not compare the place of a slice", tests: inTensor,
		old: "Shape: t.shape.String(), Offset: t.offset}",
		new: "Shape: t.shape.String()}",
	},
	{
		file: "tensor/tensor.go", why: "remote views of slices begin at the allocation", tests: inTensor,
		old: "\tp, err := w.Peer(rank, t.offset)",
		new: "\tp, err := w.Peer(rank, 0)",
	},
	{
		file: "tensor/tensor.go", why: "local views of slices begin at the allocation", tests: inTensor,
		old: "\treturn t.storage.alloc.Ptr().Add(t.offset)",
		new: "\treturn t.storage.alloc.Ptr()",
	},
	{
		file: "tensor/tensor.go", why: "contiguous views of slices begin at the allocation", tests: inTensor,
		old: "\tp, stride, err := w.Contiguous(t.offset)",
		new: "\tp, stride, err := w.Contiguous(0)",
	},
	{
		file: "tensor/tensor.go", why: "contiguous views without their stride", tests: inTensor,
		old: "\tv.strides[0] = stride / t.dtype.Bytes()\n",
		new: "\t_ = stride\n",
	},
	{
		file: "tensor/tensor.go", why: "multicast pointers of slices begin at the allocation", tests: with(inTensor, nativeTests),
		old: "\tp, err := w.Multicast(t.offset)\n",
		new: "\tp, err := w.Multicast(0)\n",
	},
	{
		file: "tensor/tensor.go", why: "peer tables of slices begin at the allocation", tests: inTensor,
		old: "\t\tp, err := w.Peer(r, t.offset)\n",
		new: "\t\tp, err := w.Peer(r, 0)\n",
	},
	{
		file: "tensor/tensor.go", why: "peer tables are made again and again", tests: inTensor,
		old: "\tif !t.table.IsNil() {\n\t\treturn t.table, nil\n\t}\n",
		new: "",
	},
	{
		file: "tensor/transfer.go", why: "puts to slices go to the allocation's beginning", tests: inTensor,
		old: "backend.Write, peer, w, t.offset, local",
		new: "backend.Write, peer, w, 0, local",
	},
	{
		file: "tensor/transfer.go", why: "gets from slices come from the allocation's beginning", tests: inTensor,
		old: "backend.Read, peer, w, t.offset, local",
		new: "backend.Read, peer, w, 0, local",
	},
	{
		file: "tensor/transfer.go", why: "transfers between dtypes", tests: inTensor,
		old: "\tcase other.DType() != remote.DType():",
		new: "\tcase false:",
	},
	{
		file: "tensor/transfer.go", why: "transfers between sizes", tests: inTensor,
		old: "\tcase other.Bytes() != remote.Bytes():",
		new: "\tcase false:",
	},
	{
		file: "tensor/transfer.go", why: "transfers between groups", tests: inTensor,
		old: "\tcase other.Memory() != remote.Memory():",
		new: "\tcase false:",
	},
	{
		file: "memory/transfer.go", why: "PutSignal does not signal", tests: inTensor,
		old: "\tif err := out.signal(s, peer, channel); err != nil || awaited == nobody {",
		new: "\tif err := error(nil); err != nil || awaited == nobody {",
	},
	{
		file: "memory/transfer.go", why: "PutSignalWait does not wait", tests: inTensor,
		old: "\treturn in.wait(s, awaited, channel)\n}",
		new: "\treturn nil\n}",
	},
	{
		file: "memory/transfer.go", why: "PutSignalWait waits for whom it has put to", tests: []stage{worldOfMore},
		old: "\treturn in.wait(s, awaited, channel)\n}",
		new: "\treturn in.wait(s, peer, channel)\n}",
	},
	{
		file: "memory/transfer.go", why: "a step of a ring is always two launches", tests: []stage{memoryTests},
		old: "\tone := kernels && bytes <= putSignalBytes &&",
		new: "\tone := kernels && awaited == nobody && bytes <= putSignalBytes &&",
	},
	{
		file: "memory/signal_put.go", why: "the launch of a step waits for rank 0", tests: []stage{memoryTests},
		old: "\t\tparams.Shard = uint64(key.awaited)\n",
		new: "",
	},
	{
		file: "tensor/transfer.go", why: "steps of a ring go to the beginning of the allocation", tests: inTensor,
		old: "PutSignalWait(s, peer, w, t.offset, local",
		new: "PutSignalWait(s, peer, w, 0, local",
	},
	{
		file: "memory/transfer.go", why: "a put whose signal is refused is put all the same", tests: inTensor,
		old: "\tout, err := m.signalsFor(call, s, peer, channel)\n\tif err != nil {\n\t\treturn err\n\t}\n",
		new: "\tout, err := m.signalsFor(call, s, peer, channel)\n\tif err != nil {\n\t\treturn errors.Join(m.Copy(s, backend.Write, peer, w, offset, local, bytes), err)\n\t}\n",
	},
	{
		file: "memory/transfer.go", why: "PutSignal signals before it puts", tests: inTensor,
		old: "\tsignalled := false\n\tbehind := func()",
		new: "\tsignalled := true\n\tif err := out.signal(s, peer, channel); err != nil {\n\t\treturn err\n\t}\n\tbehind := func()",
	},
	{
		file: "tensor/transfer.go", why: "puts with a signal go to the beginning of the allocation", tests: inTensor,
		old: "PutSignal(s, peer, w, t.offset, local",
		new: "PutSignal(s, peer, w, 0, local",
	},
	{
		file: "tensor/tensor.go", why: "slices longer than what is left", tests: inTensor,
		old: "\tif left := t.bytes - offset*t.dtype.Bytes(); bytes > left {",
		new: "\tif left := t.bytes; bytes > left {",
	},
	{
		file: "tensor/tensor.go", why: "slices of slices begin at the allocation", tests: inTensor,
		old: "t.offset + offset*t.dtype.Bytes(), bytes: bytes",
		new: "offset*t.dtype.Bytes(), bytes: bytes",
	},
	{
		file: "tensor/tensor.go", why: "slices have no rendezvous", tests: inTensor,
		old: "; part = part.whole {\n\t\tif w := part",
		new: "; part = nil {\n\t\tif w := part",
	},
	{
		file: "tensor/tensor.go", why: "a rendezvous of a slice is its tensor's too", tests: inTensor,
		old: "\t\tt.window.Store(w) //",
		new: "\t\tfor part := t; part != nil; part = part.whole {\n\t\t\tpart.window.Store(w)\n\t\t} //",
	},
	{
		file: "tensor/tensor.go", why: "slices say that they begin where their window does", tests: inTensor,
		old: "\treturn w, t.offset, nil\n",
		new: "\treturn w, 0, nil\n",
	},
	{
		file: "tensor/tensor.go", why: "peer tables of slices without elements have addresses", tests: inTensor,
		old: "\t\tif t.bytes == 0 || err != nil {\n\t\t\tp = 0\n\t\t}\n\t\twords",
		new: "\t\twords",
	},
	{
		file: "tensor/tensor.go", why: "contiguous views without elements have an address", tests: inTensor,
		old: "\tif t.bytes == 0 {\n\t\tp = 0\n\t}\n\tv := ",
		new: "\tv := ",
	},
	{
		file: "tensor/tensor.go", why: "adopted memory at odd addresses", tests: inTensor,
		old: "\tcase uint64(p)%uint64(size) != 0:",
		new: "\tcase false && uint64(p)%uint64(size) != 0:",
	},
	{
		file: "tensor/tensor.go", why: "a tensor whose close was refused cannot be used", tests: inTensor,
		old: "\t\tif st.memory.Holds(st.alloc) {\n\t\t\tt.closed.Store(false)",
		new: "\t\tif st.memory.Holds(st.alloc) {",
	},
	{
		file: "tensor/tensor.go", why: "peer tables are not given back", tests: inTensor,
		old: "\t\terr = errors.Join(err, st.memory.Device().Free(p))\n",
		new: "\t\t_ = p\n",
	},
	{
		file: "tensor/tensor.go", why: "a rank with a closed tensor stays away", tests: inTensor,
		old: "return m.FailRendezvous(ctx, closed)",
		new: "return closed",
	},
	{
		file: "tensor/tensor.go", why: "a rank with a closed tensor tells another condition", tests: inTensor,
		old: "return m.FailRendezvous(ctx, closed)",
		new: "return m.FailRendezvous(ctx, errs.ErrNotSymmetric)",
	},
	{
		file: "tensor/transfer.go", why: "prepared transfers go to the allocation's beginning", tests: inTensor,
		old: "Window: w, Offset: offset, Bytes: p.Remote.Bytes()}",
		new: "Window: w, Bytes: p.Remote.Bytes() + 0*offset}",
	},
	{
		file: "tensor/transfer.go", why: "the name of a tensor is not in the errors of transfers of it", tests: inTensor,
		old: "\treturn x, named(pairs[0].Remote.Name(), err)\n",
		new: "\treturn x, err\n",
	},
	{
		file: "tensor/host.go", why: "a Go slice of a view with gaps", tests: inTensor,
		old: "\tif v.gaps() {",
		new: "\tif false {",
	},
	{
		file: "tensor/host.go", why: "a Go slice at an odd address", tests: inTensor,
		old: "uint64(v.ptr)%uint64(size) != 0",
		new: "false",
	},
	{
		file: "tensor/view.go", why: "one row has a gap behind it", tests: inTensor,
		old: "v.shape[0] > 1 && ",
		new: "",
	},
	{
		file: "tensor/view.go", why: "reads beyond a view", tests: inTensor,
		old: "offset < 0 || offset > total || n > total-offset",
		new: "offset < 0 || offset > total",
	},
	{
		file: "tensor/view.go", why: "elements of another type", tests: inTensor,
		old: "\tif dtype != v.dtype {",
		new: "\tif false {",
	},
	{
		file: "tensor/view.go", why: "views with gaps are read to the beginning", tests: inTensor,
		old: "p.Add((from-first)*v.dtype.Bytes()), from-offset",
		new: "p.Add((from-first)*v.dtype.Bytes()), 0",
	},
	{
		file: "tensor/view.go", why: "views of closed tensors", tests: inTensor,
		old: "\tif err := v.alive(); err != nil {\n\t\treturn fmt.Errorf(\"%s: %w\", op, err)\n\t}\n",
		new: "",
	},
	{
		file: "tensor/shape.go", why: "sizes that overflow", tests: inTensor,
		old: "over != 0 || product > math.MaxInt64",
		new: "over == 0 && product > math.MaxInt64",
	},
	{
		file: "tensor/shape.go", why: "a negative dimension", tests: inTensor,
		old: "\t\tif d < 0 {",
		new: "\t\tif d < -1 {",
	},
	{
		file: "tensor/float16.go", why: "halves round ties down", tests: inTensor,
		old: "(b+0xfff+b>>13&1)>>13",
		new: "(b+0xfff)>>13",
	},
	{
		file: "kernels/host_allreduce.go", why: "one-shot has one buffer", tests: inPlans,
		old: "\tbuffers := k.buffers[r.Epoch()&1]\n",
		new: "\tbuffers := k.buffers[0]\n",
	},
	{
		file: "collective/host.go", why: "runs are not counted", tests: inCollective,
		old: "\tw.run.epoch++\n",
		new: "\tw.run.epoch |= 1\n",
	},
	{
		file: "kernels/host_slots.go", why: "slots are written before their readers are there", tests: slotTests,
		old: "\t\t\tif err := r.Wait(reader, flagEnd, read); err != nil {\n\t\t\t\treturn 0, err\n\t\t\t}\n",
		new: "\t\t\t_, _ = reader, read\n",
	},
	{
		file: "kernels/host_slots.go", why: "there is a slot less than ranks may be ahead", tests: slotTests,
		old: "slot = r.Epoch() & (x.count - 1)",
		new: "slot = r.Epoch() % (x.count - 1)",
	},
	{
		file: "kernels/host_slots.go", why: "slots are written before their readers can have told", tests: slotTests,
		old: "(r.Epoch() - x.count + half - 1) &^ (half - 1)",
		new: "(r.Epoch() - x.count) &^ (half - 1)",
	},
	{
		file: "kernels/moves.go", why: "a broadcast's root waits for nobody", tests: meetTests,
		old: "\t\ttell = slices.Concat(sources, readers)\n\t\tawait = tell\n",
		new: "\t\t_ = slices.Concat[[]int]\n",
	},
	{
		file: "kernels/moves.go", why: "moves do not wait for inputs", tests: meetTests,
		old: "meet(r, flagStart, nil, await)",
		new: "error(nil)",
	},
	{
		file: "kernels/moves.go", why: "moves do not wait until all have what they load", tests: meetTests,
		old: "\t\treturn meet(r, flagEnd, await, tell)\n",
		new: "\t\treturn nil\n",
	},
	{
		file: "kernels/moves.go", why: "a form that stores to its peers loads from them", tests: []stage{{"kernels", "ShardsStay", usual}},
		old: "return v.algorithm == OneShotPush || v.algorithm == TwoShotPush",
		new: "return false",
	},
	{
		file: "kernels/moves.go", why: "what is stored and passed on by other blocks than have got it", tests: []stage{{"kernels", "ShardsStay", usual}},
		old: "all = append(all, move{at.Tensor(specIn, from).Add(c.src), at.Tensor(v.specOut(), to).Add(c.dst), r, c})",
		new: "c.turn += to\n\t\t\tall = append(all, move{at.Tensor(specIn, from).Add(c.src), at.Tensor(v.specOut(), to).Add(c.dst), r, c})",
	},
	{
		file: "kernels/moves.go", why: "a copy engine copies a rank's own part beside what it puts to others", tests: []stage{{"kernels", "OwnPart", usual}},
		old: "case d.Kind() != device.Host && v.besides() &&",
		new: "case false &&",
	},
	{
		file: "kernels/table.go", why: "tables: whole vectors are asked for where no kernel is for such", tests: []stage{{"kernels", "WholePieces", usual}},
		old: "return size <= ptx.Inline && !(m.combines && m.op != Sum && m.op != Avg) && piece > 0",
		new: "return size <= ptx.Inline+1 && piece > 0",
	},
	{
		file: "cmd/symmem/internal/tune/table.go", why: "tables: lines that won with whole vectors are for all messages", tests: []stage{{"cmd/symmem/internal/tune", ".", usual}},
		old: "if !whole && old != nil && s.lines(p.Best.Form) {",
		new: "if false {",
	},
	{
		file: "cmd/symmem/internal/tune/table.go", why: "tables: between a size that keeps its form and one where another was beaten, that other stays", tests: []stage{{"cmd/symmem/internal/tune", ".", usual}},
		old: "return s.points[beyond].Best.Candidate != s.points[beyond].Default.Candidate",
		new: "return false",
	},
	{
		file: "kernels/reduce_host.go", why: "parts of a reduce are combined before the inputs are ready", tests: inPlans,
		old: "\t\t\tif err := run.Barrier(flagStart); err != nil {\n\t\t\t\treturn err\n\t\t\t}\n\t\t\tcombine(out",
		new: "\t\t\tcombine(out",
	},
	{
		file: "kernels/reduce_host.go", why: "a reduce does not wait for the other ranks' parts", tests: inPlans,
		old: "\t\t\treturn run.Barrier(flagEnd)\n",
		new: "\t\t\treturn nil\n",
	},
	{
		file: "kernels/host_allreduce.go", why: "one-shot waits for nobody", tests: inPlans,
		old: "\tif err := r.Barrier(flagStart); err != nil {\n\t\treturn err\n\t}\n\tk.reduce(k.out, buffers, 0, k.elements)",
		new: "\tk.reduce(k.out, buffers, 0, k.elements)",
	},
	{
		file: "kernels/host_allreduce.go", why: "two-shot does not wait for inputs", tests: inPlans,
		old: "\tif err := r.Barrier(flagStart); err != nil {\n\t\treturn err\n\t}\n\tlo, hi",
		new: "\tlo, hi",
	},
	{
		file: "kernels/host_allreduce.go", why: "two-shot does not wait for results", tests: inPlans,
		old: "\treturn r.Barrier(flagEnd)\n",
		new: "\treturn nil\n",
	},
	{
		file: "collective/host.go", why: "epochs do not count in a circle", tests: inCollective,
		old: "\t\tif have := w.Load(); int32(have-value) >= 0 {",
		new: "\t\tif have := w.Load(); have >= value {",
	},
	{
		file: "collective/host.go", why: "a rank that has waited long has not seen what it waited for", tests: inCollective,
		old: "\t*seen = value //",
		new: "\t//",
	},
	{
		file: "collective/room.go", why: "ranks of one process that share a device count each other's plans", tests: inCollective,
		old: "t.shared && o.rank != t.rank ||",
		new: "",
	},
	{
		file: "collective/host.go", why: "flags do not begin at the first epoch", tests: inCollective,
		old: "\t\t\t\tmine.Store(p.spec.FirstEpoch)\n",
		new: "",
	},
	{
		file: "kernels/host_allreduce.go", why: "the last byte of each piece is not sent", tests: inPlans,
		old: "copy(k.outs[(k.rank+i)%k.size][at*k.width:end*k.width], done)",
		new: "copy(k.outs[(k.rank+i)%k.size][at*k.width:], done[:len(done)-1])",
	},
	{
		file: "kernels/host_allreduce.go", why: "parts are too short", tests: inPlans,
		old: "\teach = (each + line - 1) / line * line\n",
		new: "\teach = each / line * line\n",
	},
	{
		file: "collective/host.go", why: "start and end have one flag", tests: inCollective,
		old: "int64(flag*f.plan.size+writer) * flagStride",
		new: "int64(flag/Flags*Flags*f.plan.size+writer) * flagStride",
	},
	{
		file: "collective/host.go", why: "an exchange does not wait for the next rank", tests: inCollective,
		old: "\tfor _, peer := range r.peers {\n\t\tif err := r.Wait(",
		new: "\tfor _, peer := range r.peers[min(1, len(r.peers)):] {\n\t\tif err := r.Wait(",
	},
	{
		file: "collective/host.go", why: "a wait in vain is no error", tests: with(inCollective, kills),
		old: "\t\treturn &device.WaitError{Op: r.name,",
		new: "\t\treturn nil\n\t\treturn &device.WaitError{Op: r.name,",
	},
	{
		file: "collective/host.go", why: "runs of graphs on two streams are not noticed", tests: inCollective,
		old: "\t\tif state&1 != 0 || ofGraph && state/2 < w.unmarked {",
		new: "\t\tif ofGraph && state/2 < w.unmarked {",
	},
	{
		file: "collective/host.go", why: "a graph does not notice a run from before its recording", tests: inCollective,
		old: "\t\tif state&1 != 0 || ofGraph && state/2 < w.unmarked {",
		new: "\t\tif state&1 != 0 {",
	},
	{
		file: "collective/host.go", why: "a run under way counts as settled", tests: inCollective,
		old: "\tw.enqueued++\n\treturn nil\n}\n\nfunc (w *hostWork) settled() (bool, error) { return w.state.Load()/2 == w.enqueued, nil }",
		new: "\tw.enqueued++\n\treturn nil\n}\n\nfunc (w *hostWork) settled() (bool, error) { return true, nil }",
	},
	{
		file: "collective/host.go", why: "a plan that has failed runs on", tests: with(inCollective, kills),
		old: "\tif err := w.plan.Err(); err != nil {\n\t\tw.state.Add(adds)\n",
		new: "\tif err := error(nil); err != nil {\n\t\tw.state.Add(adds)\n",
	},
	{
		file: "collective/host.go", why: "a run that fails does not end the plan", tests: with(inCollective, kills),
		old: "\tif err != nil {\n\t\treturn w.plan.fail(err)\n\t}\n",
		new: "\tif err != nil {\n\t\treturn err\n\t}\n",
	},
	{
		file: "collective/spec.go", why: "ranks do not vote whether all have a plan", tests: inCollective,
		old: "\tif err = m.Group().Vote(ctx, \"plan\"+form.launch(), err); err == nil {",
		new: "\tif err == nil {",
	},
	{
		file: "collective/spec.go", why: "a tensor that was closed before its plan's turn is a difference", tests: []stage{{"collective", "ClosedBeforeItsPlansTurn", usual}},
		old: "\t\tfailure = p.check() // an earlier",
		new: "\t\t_ = p.check // an earlier",
	},
	{
		file: "collective/room.go", why: "streams that are being closed have ended", tests: []stage{{"collective", "StreamThatIsBeingClosed", usual}},
		old: "return !tells || e.Ended()",
		new: "return !tells || e != nil",
	},
	{
		file: "collective/spec.go", why: "ranks do not compare a plan's first epoch", tests: inCollective,
		old: "fmt.Sprintf(\"first epoch %d\", s.FirstEpoch)",
		new: "fmt.Sprintf(\"first epoch %d\", s.FirstEpoch*0)",
	},
	{
		file: "kernels/allreduce.go", why: "ranks do not compare where a plan reads", tests: inPlans,
		old: "Tensors:    []tensor.SymmetricTensor{a.in, a.out}",
		new: "Tensors:    []tensor.SymmetricTensor{a.out, a.out}",
	},
	{
		file: "kernels/allreduce.go", why: "ranks do not compare where a plan writes", tests: inPlans,
		old: "Tensors:    []tensor.SymmetricTensor{a.in, a.out}",
		new: "Tensors:    []tensor.SymmetricTensor{a.in, a.in}",
	},
	{
		file: "collective/kernel.go", why: "an exclusive plan takes half of a device", tests: []stage{{"kernels", "TestExclusive", usual}},
		old: "\tif f.plan.spec.Exclusive {", new: "\tif false {",
	},
	{
		file: "collective/spec.go", why: "ranks do not compare whether a plan is exclusive", tests: []stage{{"kernels", "TestExclusive", usual}},
		old: "\tif s.Exclusive {", new: "\tif false {",
	},
	{
		file: "kernels/allreduce.go", why: "ranks do not compare a plan's most blocks", tests: inPlans,
		old: "fmt.Sprintf(\"at most %d blocks, in rank order %t\", a.maxBlocks, a.rankOrder)",
		new: "fmt.Sprintf(\"at most %d blocks\", 0*a.maxBlocks)",
	},
	{
		file: "kernels/allreduce.go", why: "outputs may overlap inputs", tests: inPlans,
		old: "\tif !a.inPlace && in < out+n && out < in+n {",
		new: "\tif false {",
	},
	{
		file: "kernels/allreduce.go", why: "outputs of another size", tests: inPlans,
		old: "\tcase a.out.NumElements() != a.in.NumElements():",
		new: "\tcase false:",
	},
	{
		file: "kernels/allreduce.go", why: "outputs of another dtype", tests: inPlans,
		old: "\tcase a.out.DType() != a.in.DType():",
		new: "\tcase false:",
	},
	{
		file: "kernels/allreduce.go", why: "outputs of another group", tests: inPlans,
		old: "\tcase a.out.Memory() != a.in.Memory():",
		new: "\tcase false:",
	},
	{
		file: "collective/plan.go", why: "a plan runs on two streams", tests: inCollective,
		old: "\tif !settled {",
		new: "\tif !settled && false {",
	},
	{
		file: "collective/plan.go", why: "a plan is on a stream where it had no room", tests: inCollective,
		old: "\tif err := p.tenant.move(s); err != nil {",
		new: "\tif moves {\n\t\tp.runsOn(s)\n\t}\n\tif err := p.tenant.move(s); err != nil {",
	},
	{
		file: "collective/plan.go", why: "a plan runs on another device's stream", tests: inCollective,
		old: "\tif !again && s.Device() != p.device {",
		new: "\tif false {",
	},
	{
		file: "collective/plan.go", why: "closing a plan does not wait for the device", tests: inCollective,
		old: "\t\tbusy = p.device.Synchronize(ctx)\n",
		new: "",
	},
	{
		file: "collective/plan.go", why: "memory is released while a run is being enqueued on it", tests: []stage{{"collective", "TestRunWhileFreeing", usual}},
		old: "\theld := p.memory.Hold() // what is there now is there until the run is enqueued\n\tdefer held.End()\n",
		new: "",
	},
	{
		file: "collective/plan.go", why: "a plan runs on an allocation that was freed", tests: []stage{{"collective", "TestRunWhileFreeing", usual}},
		old: "\t\tif err := w.Usable(); err != nil {\n\t\t\treturn err\n\t\t}\n",
		new: "\t\t_ = w\n",
	},
	{
		file: "kernels/reduce_push.go", why: "a record says that lines of a reduce are empty", tests: []stage{{"kernels", "TestRoomInChunks", usual}},
		old: ", EarlyEpoch: whole,",
		new: ", EarlyEpoch: whole && r.scatter,",
	},
	{
		file: "memory/memory.go", why: "whoever releases memory waits for no holds", tests: []stage{{"collective", "TestRunWhileFreeing", usual}},
		old: "\tif err := m.holds.drain(ctx); err != nil {\n\t\treturn err\n\t}\n",
		new: "",
	},
	{
		file: "memory/holds.go", why: "of holds only those of one count are waited for", tests: []stage{{"memory", "TestHolds", usual}},
		old: "\tfor range h.counts {",
		new: "\tfor range 1 {",
	},
	{
		file: "memory/holds.go", why: "a hold counts where nobody waits for it", tests: []stage{{"memory", "TestHolds", usual}},
		old: "(h.turn.Add(1)-1)&1]",
		new: "h.turn.Add(1)&1]",
	},
	{
		file: "backend/nccl/flags.go", why: "a value that is refused arrives in place of the one under way", tests: []stage{{"backend/nccl", "TestPutFlagArrivesAsItWas", usual}},
		old: "\tif err := s.ready(); err != nil {\n\t\treturn err\n\t}\n",
		new: "",
	},
	{
		file: "backend/nixl/flags.go", why: "a value that is refused is written", tests: []stage{{"backend/nixl", "TestFlagUnderWayKeepsItsWord", usual}},
		old: "\tif err := s.ready(); err != nil {\n\t\treturn err\n\t}\n",
		new: "",
	},
	{
		file: "collective/plan.go", why: "a plan that has failed can be run", tests: with(inCollective, kills),
		old: "\tif err := p.Err(); err != nil {\n\t\treturn err\n\t}\n\tfor _, t",
		new: "\tfor _, t",
	},
	{
		file: "collective/plan.go", why: "a plan runs on a closed slice", tests: []stage{{"collective", "TestRunOnClosedSlice", usual}},
		old: "\t\tif err := t.Err(); err != nil {\n\t\t\treturn err\n\t\t}\n\t}\n\tfor _, w",
		new: "\t\t_ = t\n\t}\n\tfor _, w",
	},
	{
		file: "collective/plan.go", why: "a closed plan can be run", tests: inCollective,
		old: "\tif p.closed.Load() {\n\t\treturn fmt.Errorf(\"plan: %w\", errs.ErrClosed)\n\t}\n",
		new: "",
	},
	{
		file: "collective/plan.go", why: "large workspace is never given back", tests: inCollective,
		old: "\terr = errors.Join(err, p.memory.TrimWorkspace(ctx))\n",
		new: "",
	},
	{
		file: "kernels/transfers.go", why: "small messages are sent without room", tests: inPlans,
		old: "\t\ts.wait(signalResults)\n\t\ts.send(signalData, 0)\n",
		new: "\t\ts.send(signalData, 0)\n",
	},
	{
		file: "kernels/transfers.go", why: "the first lap is not waited for", tests: inPlans,
		old: "\ts.send(signalData, 0)\n\ts.wait(signalData)\n\ts.join()\n",
		new: "\ts.send(signalData, 0)\n\ts.join()\n",
	},
	{
		file: "kernels/transfers.go", why: "the last results are not waited for", tests: inPlans,
		old: "\t\t\ts.wait(signalResults)\n\t\t}\n\t}\n\ts.join()\n\ts.finish(signalResults)\n",
		new: "\t\t\ts.wait(signalResults)\n\t\t}\n\t}\n\ts.join()\n",
	},
	{
		file: "kernels/transfers.go", why: "between GPUs the last results are not waited for", tests: inTransfers,
		old: "\tif f.laps > 1 {\n\t\ts.wait(signalResults)\n\t}\n\ts.join()\n\ts.finish(signalResults)\n",
		new: "\tif f.laps > 1 {\n\t\ts.wait(signalResults)\n\t}\n\ts.join()\n",
	},
	{
		file: "kernels/transfers.go", why: "between GPUs a lap is told of before it was copied", tests: inTransfers,
		old: "\ts.put(0)\n\ts.join()\n\ts.announce(signalData)\n",
		new: "\ts.put(0)\n\ts.announce(signalData)\n\ts.join()\n",
	},
	{
		file: "kernels/transfers.go", why: "between GPUs results go before the peers know of the next lap, and all wait for each other", tests: inTransfers,
		old: "\t\t\ts.join()\n\t\t\ts.announce(signalData)\n\t\t}\n\t\ts.fork()\n\t\ts.send(signalResults, l)\n",
		new: "\t\t\ts.join()\n\t\t}\n\t\ts.fork()\n\t\ts.send(signalResults, l)\n\t\tif l+1 < f.laps {\n\t\t\ts.announce(signalData)\n\t\t}\n",
	},
	{
		file: "kernels/transfers.go", why: "between GPUs a lap goes to a place that was not read", tests: inTransfers,
		old: "\t\t\ts.wait(signalResults) // of this lap, whose place the next one takes\n\t\t\ts.put(l + transferSlots)\n",
		new: "\t\t\ts.put(l + transferSlots)\n\t\t\ts.wait(signalResults)\n",
	},
	{
		file: "kernels/reduce_transfers.go", why: "laps with places apart do not wait for the room of a run", tests: inTransfers,
		old: "\ts.fork()\n\ts.wait(signalRoom)\n\ts.put(0)\n",
		new: "\ts.fork()\n\ts.put(0)\n\ts.wait(signalRoom)\n",
	},
	{
		file: "kernels/reduce_transfers.go", why: "a lap with a place of its own is told of before it was copied", tests: inTransfers,
		old: "\t\ts.join()\n\t\tif l+1 < f.laps {\n\t\t\ts.put(l + 1)\n\t\t}\n\t\ts.announce()\n",
		new: "\t\ts.announce()\n\t\ts.join()\n\t\tif l+1 < f.laps {\n\t\t\ts.put(l + 1)\n\t\t}\n",
	},
	{
		file: "kernels/reduce_transfers.go", why: "all laps have one place", tests: inTransfers,
		old: "\t\tat += from\n",
		new: "\t\tat += 0 * from\n",
	},
	{
		file: "collective/program.go", why: "the signals of puts without any are given with them", tests: inCollective,
		old: "\tif !signals {\n\t\tprepare = b.work.signals.PreparePuts\n\t}\n",
		new: "",
	},
	{
		file: "kernels/reduce_push.go", why: "a reduce-scatter in chunks takes the room that one in lines has", tests: []stage{{"kernels", "TestRoomInChunks", usual}},
		old: "\t\ts.Workspace = ptx.ScatterFlowBytes(share, size)\n",
		new: "",
	},
	{
		file: "kernels/reduce_push.go", why: "what is combined in chunks goes to the rank's own output and not to root's", tests: []stage{{"kernels", "TestScatterInChunks", usual}},
		old: "\t\t\t\tif flow && !r.scatter {\n\t\t\t\t\tp.Out = uint64(at.Tensor(r.specOut(), root))\n\t\t\t\t}\n",
		new: "",
	},
	{
		file: "kernels/reduce_push.go", why: "a reduce-scatter in chunks has a root", tests: []stage{{"kernels", "TestScatterInChunks", usual}},
		old: "\t\troot = size // none\n",
		new: "\t\troot = 0\n",
	},
	{
		file: "kernels/reduce_push.go", why: "the last rank that combines for root has no room for its share", tests: []stage{{"kernels", "TestRoomInChunks", usual}},
		old: "\t\tshare = shareElements(vectors, size-1) * 16\n",
		new: "\t\tshare = vectors / int64(size-1) * 16\n",
	},
	{
		file: "kernels/moves_cuda.go", why: "chunks are passed on that have come from nobody", tests: []stage{{"kernels", "BroadcastPassesOn", usual}},
		old: "\t\t\t\tc.Peer = uint32(v.root)\n",
		new: "\t\t\t\tc.Peer = uint32(at.Rank())\n",
	},
	{
		file: "kernels/broadcast.go", why: "root passes on a part that nobody has brought it", tests: []stage{{"kernels", "BroadcastPassesOn", usual}},
		old: "\t\tif rank == b.root {\n\t\t\treturn piece{}\n\t\t}\n\t\ti = (rank - b.root - 1 + shards) % shards\n\t\tshards--\n",
		new: "\t\ti = (rank - b.root - 1 + shards) % shards\n",
	},
	{
		file: "kernels/transfers.go", why: "laps of results are not waited for", tests: inPlans,
		old: "\t\tif more {\n\t\t\ts.wait(signalResults)\n\t\t}\n",
		new: "",
	},
	{
		file: "kernels/transfers.go", why: "peers have no room for the first run", tests: inPlans,
		old: "\t\ts.Program.Granted = 1 // the peers have room for the first run\n",
		new: "",
	},
	{
		file: "kernels/reduce_transfers.go", why: "a result goes on to root from where another rank puts the next one", tests: []stage{{"kernels", "LapProgram|ReduceToSlowRoot", usual}},
		old: "return f.slot(rank, f.root, lap)",
		new: "return f.slot(rank, (rank+1)%f.in.WorldSize(), lap)",
	},
	{
		file: "kernels/transfers.go", why: "laps share a slot", tests: inPlans,
		old: "\tindex := lap%f.slots()*writers + ",
		new: "\tindex := 0*lap*writers + ",
	},
	{
		file: "kernels/transfers.go", why: "every lap is the first", tests: inPlans,
		old: "\tlo = min(int64(owner)*f.shard+int64(lap)*f.lap, end)\n",
		new: "\tlo = min(int64(owner)*f.shard, end)\n",
	},
	{
		file: "collective/program.go", why: "a run that was enqueued in part does not end the plan", tests: inCollective,
		old: "\t\t\tif i > 0 && !recorded {",
		new: "\t\t\tif false {",
	},
	{
		file: "collective/program.go", why: "a run by transfers counts as settled", tests: inCollective,
		old: "\tif err := s.Record(w.ended); err != nil {",
		new: "\tif err := error(nil); err != nil {",
	},
	{
		file: "collective/program.go", why: "the lane does not wait for the stream", tests: inCollective,
		old: "\tcase w.lane == nil:\n\t\treturn nil\n\tcase t.kind == stepFork:",
		new: "\tcase w.lane == nil || t.kind == stepFork:\n\t\treturn nil\n\tcase t.kind == stepFork:",
	},
	{
		file: "collective/program.go", why: "what fails on the lane is told there", tests: inCollective,
		old: "\t\t\treturn w.signals.WaitAllBeside(lane, t.signal)",
		new: "\t\t\treturn w.signals.WaitAll(lane, t.signal)",
	},
	{
		file: "kernels/transfers_reduce.go", why: "the own input is not reduced", tests: inPlans,
		old: "\t\tif r == f.rank {\n\t\t\tsrcs = append(srcs, f.in",
		new: "\t\tif false {\n\t\t\tsrcs = append(srcs, f.in",
	},
	{
		file: "collective/program.go", why: "reductions go on after a failure", tests: inCollective,
		old: "\tif err := p.Err(); err != nil {\n\t\tif h.work.signals",
		new: "\tif err := error(nil); err != nil {\n\t\tif h.work.signals",
	},
	{
		file: "collective/program.go", why: "reductions on two streams are not noticed", tests: inCollective,
		old: "\tif h.work.running.Swap(true) {",
		new: "\tif h.work.running.Load() {",
	},
	{
		file: "kernels/host_reduce.go", why: "the third rank is left out", tests: inPlans,
		old: "\t\t\t\tfor _, src := range srcs[2:] {",
		new: "\t\t\t\tfor _, src := range srcs[min(3, len(srcs)):] {",
	},
	{
		file: "kernels/host_reduce.go", why: "averages are sums", tests: inPlans,
		old: "\t\t\tif op == Avg {\n\t\t\t\taverage(a, size)\n\t\t\t}\n\t\t\tcopy(out",
		new: "\t\t\tcopy(out",
	},
	{
		file: "kernels/host_reduce.go", why: "what is left of a vector is added from one element before", tests: inPlans,
		old: "blocks*perBlock:], x[blocks*perBlock:]",
		new: "blocks*perBlock:], x[blocks*perBlock-1:]",
	},
	{
		file: "kernels/tuning/table.go", why: "a rule does not serve larger worlds too", tests: []stage{tuningTests},
		old: "r.Ranks != ranks && !(r.AndMore && r.Ranks < ranks) {",
		new: "r.Ranks != ranks {",
	},
	{
		file: "kernels/tuning/set.go", why: "a step without bound does not serve every message", tests: []stage{tuningTests},
		old: "step.UpTo == 0 || bytes <= int64(step.UpTo)",
		new: "bytes <= int64(step.UpTo)",
	},
	{
		file: "kernels/tuning/set.go", why: "rules for multicast count where there is none", tests: []stage{tuningTests},
		old: "if multicast && !s.Multicast {\n\t\t\t\t\tcontinue",
		new: "if multicast && !s.Multicast && false {\n\t\t\t\t\tcontinue",
	},
	{
		file: "kernels/tuning/read.go", why: "fields that there are not are passed over", tests: []stage{tuningTests},
		old: "\td.DisallowUnknownFields()\n",
		new: "",
	},
	{
		file: "kernels/tuning/read.go", why: "two rules may be for the same", tests: []stage{tuningTests},
		old: "if same && o.Collective",
		new: "if same && false && o.Collective",
	},
	{
		file: "kernels/table.go", why: "tables: their number of blocks is not a plan's", tests: []stage{openTests},
		old: "if asked == 0 || table > 0 && table < asked {",
		new: "if false {",
	},
	{
		file: "kernels/table.go", why: "tables: auto does not go on without multicast objects", tests: []stage{openTests},
		old: "\treturn agreed && a.NeedsMulticast()",
		new: "\treturn false && a.NeedsMulticast()",
	},
	{
		file: "kernels/table.go", why: "tables: auto goes on without multicast addresses where another rank had failed before", tests: kernelTests,
		old: "\treturn agreed && a.NeedsMulticast()",
		new: "\treturn err != nil && (agreed || true) && a.NeedsMulticast()",
	},
	{
		file: "kernels/table.go", why: "tables: operations without push forms go by the rules for sums", tests: kernelTests,
		old: "\t\tl.dtype = \"\" //",
		new: "\t\t//",
	},
	{
		file: "kernels/allreduce.go", why: "tables: whoever asks for a form and who leaves it to auto are alike", tests: []stage{openTests},
		old: "\t\ts.Parameters += \", chosen by auto\" //",
		new: "\t\t//",
	},
	{
		file: "kernels/table.go", why: "tables: their lap is not a plan's", tests: kernelTests,
		old: "lap: int64(step.LapBytes)}, true",
		new: "lap: 0}, true",
	},
	{
		file: "cmd/symmem/internal/tune/table.go", why: "tables: what is not whole vectors goes by what was measured of such", tests: []stage{{"cmd/symmem/internal/tune", ".", usual}},
		old: "bytes, whole, func(*tuning.Step) bool { return true })",
		new: "bytes, true, func(*tuning.Step) bool { return true })",
	},
	{
		file: "cmd/symmem/internal/bench/plot.go", why: "pictures: of a peer the bandwidth, beside our bus bandwidth", tests: []stage{{"cmd/symmem/internal/bench", "Picture", usual}},
		old: "if !transfers(row.Kind) {",
		new: "if row.Algorithm != \"\" {",
	},
	{
		file: "cmd/symmem/internal/outfile/outfile.go", why: "files: what was there goes before what is new is written", tests: []stage{{"cmd/symmem/internal/outfile", ".", usual}},
		old: "\tif !f.regular {\n\t\treturn f.overwrite(text)",
		new: "\tif !f.regular || f.there {\n\t\treturn f.overwrite(text)",
	},
	{
		file: "cmd/symmem/internal/launch/start.go", why: "ranks: output that nobody takes is waited for", tests: []stage{{"cmd/symmem/command", "SecondInterruptNeedsNoReader", usual}},
		old: "case <-abandon:",
		new: "case <-(chan struct{})(nil):",
	},
	{
		file: "cmd/symmem/internal/launch/keeper.go", why: "ranks: a launcher that crashes ends as one with a status", tests: []stage{{"cmd/symmem/command", "LeavesNoGrandchildren", usual}},
		old: "debug.SetTraceback(\"crash\")",
		new: "debug.SetTraceback(\"single\")",
	},
	{
		file: "group/islands.go", why: "islands: what a rank has made up is taken", tests: []stage{{"group", "IslandsMadeUp", usual}},
		old: "found == nil && !g.canBe(settled.Of):",
		new: "found == nil && false:",
	},
	{
		file: "tuning.go", why: "ranks may have different tables", tests: []stage{openTests},
		old: "if r.Digest == all[0].Digest {",
		new: "if r.Digest == all[0].Digest || true {",
	},
	{
		file: "tuning.go", why: "a table of another GPU is taken", tests: []stage{openTests},
		old: "if !t.file.For(name, \"\") && ",
		new: "if false && !t.file.For(name, \"\") && ",
	},
	{
		file: "tuning.go", why: "unequal GPUs go by the table of rank 0's", tests: []stage{openTests},
		old: "if shipped != nil && !shipped.For(name, link) {",
		new: "if shipped != nil && name == \"\" {",
	},
	{
		file: "kernels/choose.go", why: "laps are not aligned", tests: inPlans,
		old: "\treturn false, alignUp((shard+n-1)/n, shardAlign)",
		new: "\treturn false, (shard + n - 1) / n",
	},
	{
		file: "collective/kernel.go", why: "a plan may have more blocks than run at once", tests: inCollective,
		old: "if n := sharing(offers, r); f.blocks*n > d.Resident[f.threads] {",
		new: "if n := sharing(offers, r); n < 0 {",
	},
	{
		file: "collective/kernel.go", why: "ranks that share a device may have more blocks than run at once", tests: inCollective,
		old: "if n := sharing(offers, r); f.blocks*n > d.Resident[f.threads] {",
		new: "if n := sharing(offers, r); n*0+f.blocks > d.Resident[f.threads] {",
	},
	{
		file: "kernels/cuda_allreduce.go", why: "one-shot pull in place is not staged", tests: onFakes,
		old: "\t\tcase a.inPlace:\n\t\t\tflags |= ptx.Staged\n",
		new: "\t\tcase a.inPlace:\n",
	},
	{
		file: "collective/kernel.go", why: "a plan goes on after a fault", tests: inCollective,
		old: "\tif word := w.plan.held.fault.Load(); word != 0 {\n\t\treturn w.decode(word)\n\t}\n",
		new: "",
	},
	{
		file: "collective/kernel.go", why: "a launch that failed counts", tests: inCollective,
		old: "\t\tw.enqueued.Add(^uint32(0)) // it will not run\n",
		new: "",
	},
	{
		file: "collective/kernel.go", why: "what a kernel keeps before it has ended counts as its end", tests: kernelTests,
		old: "\tif idle || w.captured.Load() || w.plan.spec.CUDA.EarlyEpoch {",
		new: "\tif idle || w.captured.Load() {",
	},
	{
		file: "kernels/many_cuda.go", why: "lists of whole vectors count as ended when they have begun", tests: kernelTests,
		old: ", EarlyEpoch: whole",
		new: "",
	},
	{
		file: "collective/kernel.go", why: "settled compares without the first epoch", tests: inCollective,
		old: "!= w.plan.spec.FirstEpoch+w.enqueued.Load()",
		new: "< w.enqueued.Load()",
	},
	{
		file: "backend/host/memory_linux.go", why: "files of peers are not checked", tests: []stage{hostTests, worldOfTwo},
		old: "\t\t} else if err := memfd.Check(f, each); err != nil {",
		new: "\t\t} else if err := error(nil); err != nil {",
	},
	{
		file: "backend/host/memory_linux.go", why: "ranks of other hosts are mapped", tests: []stage{hostTests, worldOfTwo},
		old: "\t\tif m.BootID != members[0].BootID {",
		new: "\t\tif m.BootID == \"\" && false {",
	},
	{
		file: "backend/host/memory_linux.go", why: "peers lie one unrounded size apart", tests: []stage{hostTests, worldOfTwo},
		old: "\treturn m.ptr.Add(int64(rank) * m.alloc.RoundedBytes()), nil",
		new: "\treturn m.ptr.Add(int64(rank) * m.alloc.Bytes()), nil",
	},
	{
		file: "backend/host/memory_linux.go", why: "the own copy has a second address", tests: []stage{hostTests, worldOfTwo},
		old: "\tif rank == m.rank {\n\t\treturn m.alloc.ptr, nil\n\t}\n",
		new: "",
	},
	{
		file: "backend/host/limits_linux.go", why: "memory that the host has not is allocated", tests: []stage{hostTests, worldOfTwo},
		old: "ok && bytes > left {",
		new: "ok && bytes > 1000*left {",
	},
	{
		file: "collective/spec.go", why: "ranks do not compare which window a tensor is in", tests: inCollective,
		old: "\"%s at byte %d of window %d\", what, offset, w.Number())",
		new: "\"%s at byte %d of window %d\", what, offset, w.Number()*0)",
	},
	{
		file: "collective/spec.go", why: "ranks do not compare where in a window a tensor is", tests: inCollective,
		old: "\"%s at byte %d of window %d\", what, offset, w.Number())",
		new: "\"%s at byte %d of window %d\", what, offset*0, w.Number())",
	},
	{
		file: "collective/spec.go", why: "ranks do not compare parameters", tests: inCollective,
		old: "\tif s.Parameters != \"\" {",
		new: "\tif false {",
	},
	{
		file: "collective/spec.go", why: "ranks do not compare the workspace", tests: inCollective,
		old: "fmt.Sprintf(\"workspace of %d bytes\", s.Workspace)",
		new: "fmt.Sprintf(\"workspace of %d bytes\", 0*s.Workspace)",
	},
	{
		file: "collective/spec.go", why: "ranks do not compare whether they want multicast", tests: inCollective,
		old: "\tif s.Multicast {\n\t\ttext",
		new: "\tif false {\n\t\ttext",
	},
	{
		file: "collective/spec.go", why: "ranks do not compare forms", tests: inCollective,
		old: "f.describe(), fmt",
		new: "\"\", fmt",
	},
	{
		file: "collective/spec.go", why: "a failure of one rank is its own", tests: inCollective,
		old: "\tfailure := spec.Failure\n",
		new: "\tvar failure error\n",
	},
	{
		file: "collective/spec.go", why: "tensors of another memory", tests: inCollective,
		old: "\t\tif t.Memory() != p.memory {",
		new: "\t\tif false {",
	},
	{
		file: "collective/spec.go", why: "a kernel is taken where peers have no addresses", tests: inCollective,
		old: "\treached := p.unreachable() == nil\n",
		new: "\treached := true\n",
	},
	{
		file: "collective/spec.go", why: "a plan that was not made keeps its memory", tests: inCollective,
		old: "\treturn errors.Join(err, p.held.close(p.device), m.TrimWorkspace(ctx))",
		new: "\treturn errors.Join(err, m.TrimWorkspace(ctx))",
	},
	{
		file: "collective/spec.go", why: "a plan that was not made keeps its workspace", tests: inCollective,
		old: "\terr = errors.Join(&agreedError{err}, workspace.Close(ctx))\n\tif p.work",
		new: "\terr = &agreedError{err}\n\tif p.work",
	},
	{
		file: "collective/plan.go", why: "graphs run on memory that was closed", tests: inCollective,
		old: "\t\tif err := l.Err(); err != nil {",
		new: "\t\tif err := l.Err(); err != nil && false {",
	},
	{
		file: "collective/plan.go", why: "closed plans keep their place", tests: inCollective,
		old: "\t\tp.tenant.leave()\n",
		new: "",
	},
	{
		file: "collective/plan.go", why: "closed plans keep their memory", tests: inCollective,
		old: "return errors.Join(p.work.close(), p.held.close(p.device))",
		new: "return p.work.close()",
	},
	{
		file: "collective/plan.go", why: "closed plans keep their work", tests: inCollective,
		old: "return errors.Join(p.work.close(), p.held.close(p.device))",
		new: "return p.held.close(p.device)",
	},
	{
		file: "collective/plan.go", why: "what a plan keeps at work stays when its memory goes", tests: inCollective,
		old: "p.memory.AtRelease(giveBack)",
		new: "nil",
	},
	{
		file: "collective/plan.go", why: "memory goes while the device works", tests: inCollective,
		old: "\tif busy == nil {\n\t\terr =",
		new: "\tif true {\n\t\terr =",
	},
	{
		file: "collective/plan.go", why: "plans go where there is no room", tests: inCollective,
		old: "\tif err := p.tenant.move(s); err != nil {",
		new: "\tif err := error(nil); err != nil {",
	},
	{
		file: "collective/host.go", why: "a kernel that panics does not end the plan", tests: inCollective,
		old: "\t\t\terr = w.plan.fail(brokenOff(",
		new: "\t\t\terr = error(brokenOff(",
	},
	{
		file: "collective/program.go", why: "a step that panics does not end the plan", tests: inCollective,
		old: "\t\t\terr = h.work.failSilently(brokenOff(",
		new: "\t\t\terr = error(brokenOff(",
	},
	{
		file: "collective/program.go", why: "peers get signals after a step that failed", tests: inCollective,
		old: "\t\tw.signals.Fail(err)\n",
		new: "",
	},
	{
		file: "collective/program.go", why: "a lane is not joined at the end", tests: inCollective,
		old: "\tif open {\n",
		new: "\tif open && false {\n",
	},
	{
		file: "collective/program.go", why: "a lane does not begin with the run", tests: inCollective,
		old: "\tif first != 0 && first != stepFork {",
		new: "\tif false {",
	},
	{
		file: "collective/program.go", why: "a plan with a lane runs beside its capture", tests: inCollective,
		old: "\tif !recorded && w.lane != nil && w.lane.Capturing() {",
		new: "\tif false {",
	},
	{
		file: "collective/program.go", why: "launches of a program are not closed", tests: inCollective,
		old: "\t\tif step.launch != nil {",
		new: "\t\tif false {",
	},
	{
		file: "collective/program.go", why: "signals are not granted", tests: inCollective,
		old: "Granted: g.Granted, First:",
		new: "First:",
	},
	{
		file: "collective/program.go", why: "unknown signals", tests: inCollective,
		old: "signal < 0 || signal >= n {",
		new: "false && signal >= n {",
	},
	{
		file: "collective/addresses.go", why: "puts to ranks that do not exist", tests: inCollective,
		old: "put.Peer < 0 || put.Peer >= p.size ||",
		new: "",
	},
	{
		file: "collective/addresses.go", why: "puts behind the workspace", tests: inCollective,
		old: "put.Bytes > a.plan.spec.Workspace-put.Offset",
		new: "put.Bytes < 0",
	},
	{
		file: "collective/addresses.go", why: "puts behind a tensor", tests: inCollective,
		old: "put.Bytes > n-put.Offset",
		new: "n < 0",
	},
	{
		file: "collective/addresses.go", why: "Comm has no table", tests: inCollective,
		old: "\tif size > ptx.Inline {",
		new: "\tif false {",
	},
	{
		file: "collective/addresses.go", why: "Comm's table begins with the tensors", tests: inCollective,
		old: "int64(8 * len(p.spec.Tensors) * size)",
		new: "0",
	},
	{
		file: "collective/kernel.go", why: "blocks have no workspace", tests: inCollective,
		old: "+int64(f.blocks)*k.BlockWorkspace, 1), nil",
		new: "+0*k.BlockWorkspace, 1), nil",
	},
	{
		file: "collective/kernel.go", why: "fewer blocks than a kernel must have", tests: inCollective,
		old: "\tif least := max(k.MinBlocks, clusterBlocks(f.function)); f.blocks < least {",
		new: "\tif least := 0; f.blocks < least {",
	},
	{
		file: "collective/kernel.go", why: "a kernel without records never moves", tests: inCollective,
		old: "\tidle, err := w.plan.idle()\n",
		new: "\tidle, err := false, error(nil)\n",
	},
	{
		file: "collective/kernel.go", why: "records do not begin at the first epoch", tests: inCollective,
		old: "\tif err := p.beginRecords(0, f.blocks); err != nil {",
		new: "\tif err := error(nil); err != nil {",
	},
	{
		file: "collective/params.go", why: "parameters with holes", tests: inCollective,
		old: "uintptr(len(b)) == t.Size()",
		new: "t.Size() > 0",
	},
	{
		file: "collective/waiting.go", why: "a run has a kernel that waits for peers twice", tests: inCollective,
		old: "if k.launched {", new: "if false {",
	},
	{
		file: "collective/waiting.go", why: "the lane gives up with the plan's stream", tests: inCollective,
		old: "\t\t\t\t\tc.Timeout = min(c.Timeout, math.MaxInt64/laneTimeouts) * laneTimeouts", new: "\t\t\t\t\t_ = laneTimeouts",
	},
	{
		file: "collective/waiting.go", why: "a program takes what its last kernel does", tests: inCollective,
		old: "if k.tenant != nil && (p.tenant == nil || k.tenant.takes > p.tenant.takes) {", new: "if k.tenant != nil {",
	},
	{
		file: "collective/waiting.go", why: "errors have the places of ranks among some", tests: inCollective,
		old: "f.Peer = uint16(among[f.Peer])", new: "_ = f.Peer",
	},
	{
		file: "collective/copy_computed.go", why: "copies of two runs go on side by side", tests: inCollective,
		old: "if c.work.running.Swap(true) {", new: "if c.work.running.Swap(true) && false {",
	},
	{
		file: "collective/waiting.go", why: "the reason of the first StopIf is that of all", tests: inCollective,
		old: " || f.Peer != uint16(number)", new: "",
	},
	{
		file: "collective/waiting.go", why: "the reason of the first JoinInTime is that of all", tests: inCollective,
		old: " || f.Index != uint16(number)", new: "",
	},
	{
		file: "memory/kernel.go", why: "kernels wait on for a rank that is lost", tests: inSuite,
		old: "\t\t\tstop.Stop()", new: "\t\t\t_ = stop",
	},
	{
		file: "memory/kernel.go", why: "images are loaded again and again", tests: inSuite,
		old: "\t\tc.modules[sum] = l\n", new: "",
	},
	{
		file: "collective/waiting.go", why: "all kernels of a program have one place for their records", tests: inCollective,
		old: "\t\tat += ptx.ControlBytes(w.blocks, f.plan.size)\n", new: "",
	},
	{
		file: "collective/waiting.go", why: "the addresses that a kernel had are those of all ranks", tests: inCollective,
		old: "defer func() { a.ranks, a.records, a.blocks, a.table = nil, 0, 0, 0 }()", new: "defer func() { a.ranks, a.records, a.blocks = nil, 0, 0 }()",
	},
	{
		file: "memory/heap_requests.go", why: "ranks meet nowhere any more when they have differed in a heap", tests: inSuite,
		old: "\t\tif h.broken == nil {", new: "\t\tif true {",
	},
	{
		file: "memory/signal_put.go", why: "every put's launch is kept", tests: inSuite,
		old: "if len(c.order) <= mostPutLaunches {", new: "if true {",
	},
	{
		file: "collective/waiting.go", why: "kernels look at a word that is none", tests: inCollective,
		old: "case word.IsNil() || word%stopWordBytes != 0:", new: "case false:",
	},
	{
		file: "collective/room.go", why: "a plan does not count the plans beside it", tests: inCollective,
		old: "\tif streams > 0 && t.takes+taken > t.most+1e-9 {\n\t\treturn",
		new: "\tif false {\n\t\treturn",
	},
	{
		file: "kernels/many_host.go", why: "outputs of a list may be written after the run", tests: inPlans,
		old: "\treturn r.Barrier(flagEnd)",
		new: "\treturn nil",
	},
	{
		file: "kernels/many_host.go", why: "inputs of a list are read before they are ready", tests: inPlans,
		old: "func (k *hostMany) twoShot(r *collective.HostRun) error {\n\tif err := r.Barrier(flagStart); err != nil {\n\t\treturn err\n\t}\n",
		new: "func (k *hostMany) twoShot(r *collective.HostRun) error {\n",
	},
	{
		file: "kernels/many_host.go", why: "a list has one copy of the inputs and not two", tests: inPlans,
		old: "k.stretches[r.Epoch()&1]",
		new: "k.stretches[r.Epoch()&0]",
	},
	{
		file: "kernels/many_host.go", why: "tensors of a list that do not adjoin are taken together", tests: []stage{manyTests},
		old: "in == inAt && out == outAt",
		new: "in == inAt && (out == outAt || true)",
	},
	{
		file: "kernels/many_cuda.go", why: "stretches of a list overlap", tests: []stage{manyTests},
		old: "\t\tline += all\n",
		new: "\t\tline += all - 1\n",
	},
	{
		file: "kernels/ptx/layout.go", why: "a stretch of a list of whole vectors begins where its tensor does", tests: []stage{manyTests},
		old: "In: s.In + s.First*16,",
		new: "In: s.In,",
	},
	{
		file: "kernels/many_cuda.go", why: "stretches beyond those in the parameter are others", tests: []stage{manyTests},
		old: "\tm := ptx.WholeMany{Stretches: uint64(at.Upload(list.Bytes()))",
		new: "\tm := ptx.WholeMany{Stretches: uint64(at.Upload(list.Bytes()[24:]))",
	},
	{
		file: "kernels/many_cuda.go", why: "every rank reduces the same stretches of a list", tests: []stage{manyTests},
		old: "for i := at.Rank(); i < len(stretches); i += size {",
		new: "for i := 0; i < len(stretches); i += size {",
	},
	{
		file: "kernels/many_cuda.go", why: "a list with an odd tensor takes the kernel for whole vectors", tests: []stage{manyTests},
		old: "\t\tif !wholeVectors(v.In, v.Out) {",
		new: "\t\tif false {",
	},
	{
		file: "kernels/many_transfers.go", why: "a list is not scattered", tests: inPlans,
		old: "\t\treturn m.addCopies(b, scatter)",
		new: "\t\treturn nil",
	},
	{
		file: "kernels/many.go", why: "an output in a list may overlap another", tests: inPlans,
		old: "\t\t\tbefore = last\n",
		new: "\t\t\tbefore = span{}\n",
	},
	{
		file: "kernels/many.go", why: "an input in a list may overlap an output", tests: inPlans,
		old: "\t\tbefore := lastWritten\n",
		new: "\t\tbefore := span{}\n",
	},
	{
		file: "kernels/many.go", why: "what is not this rank's share may be written to in an input of a list", tests: []stage{manyTests},
		old: "\t\t\tadd(m.whole(p), i, true)\n",
		new: "\t\t\tadd(p.Out, i, true)\n",
	},
	{
		file: "kernels/many_cuda.go", why: "the last rank says how many lines all have of a tensor", tests: []stage{manyTests},
		old: "\t\t\tn = max(n, vectors(list[tensor]))\n",
		new: "\t\t\tn = vectors(list[tensor])\n",
	},
	{
		file: "kernels/many_moves.go", why: "lines of a list are written that were not taken", tests: []stage{manyTests},
		old: "return sends[rank] && !sends[r], sends[r]",
		new: "return sends[rank] && sends[r] && false, sends[r]",
	},
	{
		file: "kernels/many_moves.go", why: "nobody is told that lines of a list were taken", tests: []stage{manyTests},
		old: "sends[r] && !sends[rank] }, true)",
		new: "sends[r] && sends[rank] && false }, true)",
	},
	{
		file: "kernels/many_moves.go", why: "what is gathered is loaded before it is ready", tests: []stage{worldOfTwo},
		old: "\t\t\tif err := meet(r, flagStart, nil, peers); err != nil {\n\t\t\t\treturn err\n\t\t\t}\n",
		new: "",
	},
	{
		file: "kernels/many_moves.go", why: "what others gather may be written to", tests: []stage{worldOfTwo},
		old: "\t\t\treturn meet(r, flagEnd, peers, peers)",
		new: "\t\t\treturn nil",
	},
	{
		file: "kernels/many_moves.go", why: "what is gathered by transfers is not scattered", tests: []stage{manyTests},
		old: "\t\treturn m.addCopies(b, scatter)",
		new: "\t\treturn nil",
	},
	{
		file: "kernels/many_reduce_scatter.go", why: "lines of shares are written that were not taken", tests: []stage{manyTests},
		old: "return gets[r] && !gets[rank], gets[rank]",
		new: "return gets[r] && gets[rank] && false, gets[rank]",
	},
	{
		file: "kernels/many_reduce_scatter.go", why: "shares of a list are stored to the others' tensors", tests: []stage{manyTests},
		old: "stretches[i].OutRow = ptx.OwnOnly",
		new: "stretches[i].OutRow = 0",
	},
	{
		file: "kernels/many_reduce_scatter.go", why: "shares of a list are combined before they are ready", tests: []stage{worldOfTwo},
		old: "\t\t\tif err := meet(run, flagStart, peers, peers); err != nil {\n\t\t\t\treturn err\n\t\t\t}\n",
		new: "",
	},
	{
		file: "kernels/many_reduce_scatter.go", why: "what others combine of a list may be written to", tests: []stage{worldOfTwo},
		old: "\t\t\treturn meet(run, flagEnd, peers, peers)",
		new: "\t\t\treturn nil",
	},
	{
		file: "kernels/many_reduce_scatter.go", why: "shares of a list go to the place of the rank that gets them", tests: []stage{manyTests},
		old: "Offset: int64(size+rank) * block",
		new: "Offset: int64(size+to) * block",
	},
	{
		file: "kernels/many.go", why: "the place of a tensor in a list is not compared", tests: inPlans,
		old: "\t\t\tall = append(all, dtype+in+\" to \"+out)\n",
		new: "\t\t\tall = append(all, (dtype+in+out)[:0]+\"a tensor\")\n",
	},
	{
		file: "kernels/moves_cast.go", why: "what is stored to all ranks goes to the beginning of their outputs", tests: kernelTests,
		old: "at.Multicast(v.specOut()).Add(c.dst)",
		new: "at.Multicast(v.specOut())",
	},
	{
		file: "memory/memory.go", why: "each rank has the kernels of its own GPU", tests: []stage{{"kernels", "UnlikeGPUs", usual}},
		old: "\tif c := m.capability.Load(); c != 0 {",
		new: "\tif c := m.capability.Load(); c != 0 && false {",
	},
	{
		file: "kernels/moves_cast.go", why: "devices without multimem are given a kernel with it", tests: kernelTests,
		old: "!ptx.Hopper(d)",
		new: "!ptx.Hopper(d) && false",
	},
	{
		file: "kernels/reduce_cuda.go", why: "the switch adds the first share for every rank", tests: kernelTests,
		old: "at.Multicast(specIn).Add(lo * r.in.DType().Bytes())",
		new: "at.Multicast(specIn)",
	},
	{
		file: "kernels/allreduce.go", why: "RankOrder is ignored by Auto", tests: kernelTests,
		old: "opts.RankOrder && !a.RankOrder() || ",
		new: "",
	},
	{
		file: "kernels/allreduce.go", why: "the setting rank-order is ignored by all-reduce", tests: kernelTests,
		old: "opts.Algorithm == Auto && t.Memory().RankOrder()",
		new: "false",
	},
	{
		file: "kernels/options.go", why: "the setting rank-order is ignored by reductions", tests: kernelTests,
		old: "m.opts.Algorithm == Auto && !errs.IsNil(in) && in.Memory().RankOrder()",
		new: "false",
	},
	{
		file: "kernels/allreduce.go", why: "RankOrder allows every form", tests: kernelTests,
		old: "a.rankOrder && !a.algorithm.RankOrder()",
		new: "a.rankOrder && !a.algorithm.known()",
	},
	{
		file: "kernels/host_allreduce.go", why: "one rank's part is combined from the last rank on", tests: inPlans,
		old: "\t\tk.reduce(k.out, k.ins, at, end)",
		new: "\t\tbackwards := append([][]byte(nil), k.ins...)\n\t\tfor i := range backwards {\n\t\t\tbackwards[i] = k.ins[len(k.ins)-1-i]\n\t\t}\n\t\tk.reduce(k.out, backwards, at, end)",
	},
	{
		file: "rank.go", why: "Close waits longer than its context for a plan that is being made", tests: callTests,
		old: "r.memory.InTurn(ctx, \"closing",
		new: "r.memory.InTurn(context.WithoutCancel(ctx), \"closing",
	},
	{
		file: "rank.go", why: "a rank is closed under a sub-group that was kept", tests: callTests,
		old: "\t\tif s.open() {",
		new: "\t\tif s.open() && false {",
	},
	{
		file: "rank.go", why: "sub-groups are closed in the order in which each rank has made them", tests: []stage{{".", "Forgotten", usual}},
		old: "return cmp.Or(cmp.Compare(len(y), len(x)), cmp.Compare(y, x))",
		new: "return 0 * cmp.Or(cmp.Compare(len(y), len(x)), cmp.Compare(y, x))",
	},
	{
		file: "rank.go", why: "Close waits longer than its context for a call that a stream holds up", tests: []stage{{".", "BesideARun", usual}},
		old: "r.calls.shut(ctx)",
		new: "r.calls.shut(context.WithoutCancel(ctx))",
	},
	{
		file: "collectives.go", why: "recorded plans take the place of others", tests: callTests,
		old: "} else if !p.recorded {\n\t\t\tleft++",
		new: "} else {\n\t\t\tleft++",
	},
	{
		file: "collectives.go", why: "the plan that was used last makes room", tests: callTests,
		old: "e := c.recent.Back(); e != nil && left >= c.most; e = e.Prev()",
		new: "e := c.recent.Front(); e != nil && left >= c.most; e = e.Next()",
	},
	{
		file: "collectives.go", why: "plans of closed tensors are found", tests: callTests,
		old: "!ok || e.Value.(*cachedPlan).stale()",
		new: "!ok",
	},
	{
		file: "collectives.go", why: "what the ranks have called before is not compared", tests: callTests,
		old: "func(r callRecord) string { return fmt.Sprintf(\"%x\", r.History) }",
		new: "func(r callRecord) string { return \"\" }",
	},
	{
		file: "collectives.go", why: "what the ranks call is not compared", tests: callTests,
		old: "func(r callRecord) string { return r.What }",
		new: "func(r callRecord) string { return \"\" }",
	},
	{
		file: "collectives.go", why: "a tensor that one rank has closed is not noticed", tests: callTests,
		old: "func(r callRecord) string { return fmt.Sprint(r.Replaces) }",
		new: "func(r callRecord) string { return \"\" }",
	},
	{
		file: "collectives.go", why: "a plan ends with the slice that it was made through", tests: callTests,
		old: "what.lasting()\n\treturn what, false, nil\n}\n\n// findPairs",
		new: "return what, false, nil\n}\n\n// findPairs",
	},
	{
		file: "collectives.go", why: "a plan of many ends with a slice that it was made through", tests: callTests,
		old: "what := &call{key, known, slices.Clone(ts), failure}\n\twhat.lasting()",
		new: "what := &call{key, known, slices.Clone(ts), failure}",
	},
	{
		file: "collectives.go", why: "a call through a closed slice waits for ranks that run their plan", tests: callTests,
		old: "known && ok && !e.Value.(*cachedPlan).stale()",
		new: "known && ok && e.Value.(*cachedPlan).stale()",
	},
	{
		file: "tensor/tensor.go", why: "what outlives a slice has not the slice's own rendezvous", tests: []stage{tensorTests},
		old: "lasting.window.Store(w)",
		new: "_ = w",
	},
	{
		file: "tensor/tensor.go", why: "a plan of an empty tensor ends with that", tests: with([]stage{tensorTests}, callTests...),
		old: "part.storage != nil && part.bytes == 0",
		new: "part.storage != nil && part.bytes < 0",
	},
	{
		file: "tensor/tensor.go", why: "what should outlive a slice ends with it", tests: []stage{tensorTests},
		old: "whole: owner, name: part.name",
		new: "whole: part, name: part.name",
	},
	{
		file: "backend/nvshmem/collective.go", why: "no barrier in front of a collective of NVSHMEM's", tests: []stage{nvshmemTests},
		old: "if p.what != \"\" {\n\t\t\t// What",
		new: "if p.call == nil {\n\t\t\t// What",
	},
	{
		file: "backend/nvshmem/collective.go", why: "NVSHMEM's reduce-scatter may be of any size", tests: []stage{nvshmemTests},
		old: "size > 1 && ins > b.world.reduceRoom()",
		new: "size > 1 && ins > 1<<40",
	},
	{
		file: "backend/nvshmem/collective.go", why: "what is not aligned goes as integers of 32 bits", tests: []stage{nvshmemTests},
		old: "bytes%wide == 0 && p.in%wide == 0 && p.out%wide == 0",
		new: "bytes%wide == 0",
	},
	{
		file: "backend/nvshmem/collective.go", why: "NVSHMEM's all-gather may be in place", tests: []stage{nvshmemTests},
		old: "p.what != \"broadcast\" && p.in < p.out.Add(outs)",
		new: "p.what == \"reduce_scatter\" && p.in < p.out.Add(outs)",
	},
}
