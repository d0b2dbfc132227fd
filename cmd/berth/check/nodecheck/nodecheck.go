// Package nodecheck tells what a node lacks to run berth and kubelet's pods on it, and
// how to mend it.
//
// # Contract
//
// Run changes nothing that stays: it reads files, asks the kernel by system calls, and
// where only trying gives an answer it tries in a directory of its own below the
// configured one, or below the nearest above that exists, and removes it, and in network namespaces of its own. Modules that
// the kernel loads for that stay, as they would for the first pod. It needs no daemon and disturbs none.
// When ctx ends it asks nothing more.
package nodecheck

import (
	"context"
	"fmt"
	"log/slog"

	"berth/cmd/berth/config"
	"berth/cni"
	"berth/internal/host"
)

// Level says how much a finding matters.
type Level string

const (
	OK      Level = "ok"
	Warning Level = "warning" // something works less well, or not for all pods
	Failure Level = "failure" // no pod can run
)

// Finding is the answer to one question about the node.
type Finding struct {
	Subject string `json:"subject"`        // what was looked at
	Level   Level  `json:"level"`          // how much it matters
	Found   string `json:"found"`          // what is there
	Mend    string `json:"mend,omitempty"` // what to do; empty if it is well
}

// Node is what the checks look at.
type Node struct {
	Config        *config.Config
	Source        string // whose configuration that is
	Facts         host.Facts
	SystemdCgroup bool   // the cgroup driver, "auto" decided
	Shim          string // the berth-shim program; empty if there is none
	ShimError     error  // why there is none
	Unpack        string // the berth-unpack program; empty if there is none
	UnpackError   error  // why there is none
	Network       cni.Config

	root string // where proc, sys and run are: "/"; another directory in tests
}

// check answers questions about one area.
type check func(context.Context, *Node) []Finding

// Run answers all questions, in the order in which an operator would mend things.
func Run(ctx context.Context, n *Node) []Finding {
	if n.root == "" {
		n.root = "/"
	}
	var all []Finding
	for _, c := range []check{
		checkSource, checkProcess, checkKernel, checkFilesystems, checkSysctls, checkCgroups, checkDirectories, checkPropagation,
		checkUserNamespaces, checkSecurityModules, checkPrograms, checkSockets, checkHandlers, checkNetworkParts, checkNetwork,
	} {
		if ctx.Err() != nil {
			break
		}
		all = append(all, c(ctx, n)...)
	}
	return all
}

// checkSource tells whose configuration the others look at.
func checkSource(_ context.Context, n *Node) []Finding {
	if n.Source == "" {
		return nil
	}
	return []Finding{ok("configuration", "%s", n.Source)}
}

// Worst is the level of the worst finding.
func Worst(findings []Finding) Level {
	worst := OK
	for _, f := range findings {
		if f.Level == Failure || f.Level == Warning && worst == OK {
			worst = f.Level
		}
	}
	return worst
}

func ok(subject, format string, args ...any) Finding {
	return Finding{Subject: subject, Level: OK, Found: fmt.Sprintf(format, args...)}
}

// lacking is a finding that needs mending.
func lacking(level Level, subject, found, mend string) Finding {
	return Finding{Subject: subject, Level: level, Found: found, Mend: mend}
}

// quiet is for packages that want a logger: what they would log is in the findings.
func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }
