package group

// LaunchReport is what one launcher's variables say, for people who diagnose a launch.
type LaunchReport struct {
	Launcher string   // the name to ask for it by: "slurm"
	Found    []string // its variables that are set, as NAME=value
	Started  bool     // it has started this process
	Chosen   bool     // DetectLaunch with the same options takes from it what is not explicit
	Why      string   // why it is chosen, or why not
}

// launchVars are the variables that give a place explicitly.
var launchVars = []string{"SYMMEM_LAUNCHER", "SYMMEM_RANK", "SYMMEM_WORLD_SIZE", "SYMMEM_LOCAL_RANK", "SYMMEM_LOCAL_WORLD_SIZE",
	"SYMMEM_RENDEZVOUS_ADDR", "SYMMEM_JOB", "SYMMEM_RESTART"}

// Launchers reports on every launcher that [DetectLaunch] knows, in the order that it tries them: first what is given
// explicitly ("explicit"), last no launcher at all ("none"). It only reads variables, through getenv; nil is os.Getenv. opts are those of DetectLaunch.
func Launchers(getenv func(string) string, opts *LaunchOptions) []LaunchReport {
	if opts == nil {
		opts = &LaunchOptions{}
	}
	e := newLaunchEnv(getenv)
	explicit := LaunchReport{Launcher: "explicit", Found: e.shown(launchVars)}
	given, err := e.explicit(opts.Explicit)
	switch {
	case err != nil:
		explicit.Why, given = err.Error(), NoLaunch()
	case given == NoLaunch():
		explicit.Why = "no setting gives a place"
	default:
		explicit.Why, explicit.Chosen = "what is given explicitly wins", true
		explicit.Started = given.Rank != -1 && given.WorldSize != 0
	}

	chosen, why, err := e.choose(opts.Launcher, given)
	reports := []LaunchReport{explicit}
	for i, r := range e.readAll() {
		report := LaunchReport{Launcher: r.name, Found: e.shown(launchers[i].vars), Started: r.started, Why: r.why}
		switch {
		case err == nil && r.name == chosen.name:
			report.Started, report.Chosen, report.Why = true, true, why+": "+r.why
		case err == nil && r.started && why == whyVariable:
			report.Why = r.why + ", but SYMMEM_LAUNCHER asks for " + chosen.name
		case err == nil && r.started && why == whyAsked:
			report.Why = r.why + ", but " + chosen.name + " was asked for"
		case err == nil && r.started:
			report.Why = r.why + ", but " + chosen.name + " comes first"
		case r.suspect != nil:
			report.Why = r.suspect.Error()
		}
		reports = append(reports, report)
	}
	none := LaunchReport{Launcher: launchNone, Why: "a launcher has started this process"}
	switch {
	case err != nil:
		none.Why = err.Error()
	case chosen.name == launchNone:
		none.Chosen, none.Started, none.Why = true, true, why
	}
	return append(reports, none)
}
