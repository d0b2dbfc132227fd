// Package nodecheck checks whether a node can run berth and kubelet's pods, and suggests fixes.
//
// # Contract
//
// Run changes nothing permanently. It reads files and makes system calls. If only an attempt gives
// an answer, it creates temporary network namespaces and directories. The directories are below the
// configured one or its nearest existing ancestor. Kernel modules that an attempt loads
// stay loaded, as after the first pod. Run needs no daemon and does not disturb one. It stops when
// ctx ends.
package nodecheck

import (
	"context"
	"fmt"
	"log/slog"

	"berth/cmd/config"
	"berth/cni"
	"berth/internal/host"
)

// Level is the severity of a finding.
type Level string

const (
	OK      Level = "ok"
	Warning Level = "warning" // a feature is missing, or some pods cannot run
	Failure Level = "failure" // no pod can run
)

// Finding is the result of one check.
type Finding struct {
	Subject string `json:"subject"`       // the checked object
	Level   Level  `json:"level"`         // severity
	Found   string `json:"found"`         // the result
	Fix     string `json:"fix,omitempty"` // how to fix it; empty if nothing is wrong
}

// Node is the input of the checks.
type Node struct {
	Config        *config.Config
	Source        string // origin of the configuration
	Facts         host.Facts
	SystemdCgroup bool   // whether systemd manages cgroups; "auto" is decided
	Shim          string // path of berth-shim; empty if not found
	ShimError     error  // why it was not found
	Unpack        string // path of berth-unpack; empty if not found
	UnpackError   error  // why it was not found
	Stream        string // path of berth-stream; empty if not found
	StreamError   error  // why it was not found
	Network       cni.Config

	root string // parent directory of proc, sys and run: "/", or another directory in tests
}

// check performs the checks of one area.
type check func(context.Context, *Node) []Finding

// Run performs all checks, ordered so that an operator can fix the problems one after another.
func Run(ctx context.Context, n *Node) []Finding {
	if n.root == "" {
		n.root = "/"
	}
	var all []Finding
	for _, c := range []check{
		checkSource, checkProcess, checkKernel, checkFilesystems, checkSysctls, checkCgroups, checkDirectories,
		checkPropagation,
		checkUserNamespaces, checkSecurityModules, checkPrograms, checkSockets, checkHandlers, checkCheckpoints,
		checkNetworkParts, checkNetwork,
	} {
		if ctx.Err() != nil {
			break
		}
		all = append(all, c(ctx, n)...)
	}
	return all
}

// checkSource reports the origin of the configuration.
func checkSource(_ context.Context, n *Node) []Finding {
	if n.Source == "" {
		return nil
	}
	return []Finding{ok("configuration", "%s", n.Source)}
}

// Worst returns the level of the worst finding.
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

// lacking returns a finding that needs a fix.
func lacking(level Level, subject, found, fix string) Finding {
	return Finding{Subject: subject, Level: level, Found: found, Fix: fix}
}

// quiet returns a logger that drops everything, because the findings contain it.
func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }
