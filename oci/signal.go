package oci

import (
	"fmt"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
)

// The real-time signals as C libraries number them; they keep the first two to themselves.
const (
	sigRTMin = 34
	sigRTMax = 64
)

// StopSignal returns the signal that asks a container to end: the one its CRI config
// asks for, else its image's, else SIGTERM (KEP-4960). ContainerSpec has refused
// what is no signal; here it counts as nothing.
func StopSignal(asked runtimeapi.Signal, image string) syscall.Signal {
	sig, err := stopSignal(asked, image)
	if err != nil {
		return unix.SIGTERM
	}
	return sig
}

func stopSignal(asked runtimeapi.Signal, image string) (syscall.Signal, error) {
	if asked != runtimeapi.Signal_SIGNAL_RUNTIME_DEFAULT {
		sig, ok := signalNumbers[asked]
		if !ok {
			return 0, errdefs.InvalidArgument("stop_signal: unknown value %d", asked)
		}
		return sig, nil
	}
	if image == "" {
		return unix.SIGTERM, nil
	}
	sig, err := ParseSignal(image)
	if err != nil {
		return 0, fmt.Errorf("stop signal of the image: %w", err)
	}
	return sig, nil
}

// signalAliases are second names, which package unix does not know.
var signalAliases = map[string]syscall.Signal{"IOT": unix.SIGABRT, "CLD": unix.SIGCHLD, "POLL": unix.SIGIO}

// ParseSignal reads a signal as images write it: "SIGTERM", "term", "15", "SIGRTMIN+3",
// "RTMAX-1". InvalidArgument if it is none.
func ParseSignal(text string) (syscall.Signal, error) {
	if n, err := strconv.ParseUint(text, 10, 8); err == nil && n >= 1 && n <= sigRTMax {
		return syscall.Signal(n), nil
	}
	name := strings.TrimPrefix(strings.ToUpper(text), "SIG")
	if n := unix.SignalNum("SIG" + name); n != 0 {
		return n, nil
	}
	if n, ok := signalAliases[name]; ok {
		return n, nil
	}
	if n, ok := parseRealtime(name); ok {
		return n, nil
	}
	return 0, errdefs.InvalidArgument("%q is not a signal", text)
}

// parseRealtime reads RTMIN, RTMIN+n, RTMAX and RTMAX-n.
func parseRealtime(name string) (syscall.Signal, bool) {
	base, sign := sigRTMin, 1
	rest, ok := strings.CutPrefix(name, "RTMIN")
	if !ok {
		if rest, ok = strings.CutPrefix(name, "RTMAX"); !ok {
			return 0, false
		}
		base, sign = sigRTMax, -1
	}
	if rest == "" {
		return syscall.Signal(base), true
	}
	if sign > 0 && rest[0] != '+' || sign < 0 && rest[0] != '-' {
		return 0, false
	}
	offset, err := strconv.ParseUint(rest[1:], 10, 8)
	if err != nil || offset > sigRTMax-sigRTMin {
		return 0, false
	}
	return syscall.Signal(base + sign*int(offset)), true
}

// CRISignal returns a signal as ContainerStatus reports it, SIGNAL_RUNTIME_DEFAULT for
// one that the CRI has no value for.
func CRISignal(sig syscall.Signal) runtimeapi.Signal { return criSignals[sig] }

// signalNumbers and criSignals come from the names of the CRI's values: SIGNAL_SIGTERM,
// SIGNAL_SIGRTMINPLUS1, SIGNAL_SIGRTMAXMINUS14. Of two names for one number
// (SIGCHLD and SIGCLD) the lower value is reported.
var signalNumbers, criSignals = func() (map[runtimeapi.Signal]syscall.Signal, map[syscall.Signal]runtimeapi.Signal) {
	numbers := make(map[runtimeapi.Signal]syscall.Signal)
	values := make(map[syscall.Signal]runtimeapi.Signal)
	spelled := strings.NewReplacer("PLUS", "+", "MINUS", "-")
	for value, name := range runtimeapi.Signal_name {
		sig, err := ParseSignal(spelled.Replace(strings.TrimPrefix(name, "SIGNAL_")))
		if err != nil {
			continue // SIGNAL_RUNTIME_DEFAULT
		}
		s := runtimeapi.Signal(value)
		numbers[s] = sig
		if old, ok := values[sig]; !ok || s < old {
			values[sig] = s
		}
	}
	return numbers, values
}()
