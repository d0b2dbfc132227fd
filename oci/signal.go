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

// The real-time signals in the numbering of C libraries, which reserve the first two.
const (
	sigRTMin = 34
	sigRTMax = 64
)

// StopSignal returns the signal that stops a container: the CRI config's, the image's, or SIGTERM
// (KEP-4960). Invalid signals are ignored, because ContainerSpec has refused them.
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

// signalAliases are names that package unix lacks.
var signalAliases = map[string]syscall.Signal{"IOT": unix.SIGABRT, "CLD": unix.SIGCHLD, "POLL": unix.SIGIO}

// ParseSignal parses a signal in an image's notation: "SIGTERM", "term", "15", "SIGRTMIN+3",
// "RTMAX-1". The error is InvalidArgument.
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

// parseRealtime parses RTMIN, RTMIN+n, RTMAX and RTMAX-n.
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

// CRISignal returns a signal for ContainerStatus, or SIGNAL_RUNTIME_DEFAULT if the CRI has no value
// for the signal.
func CRISignal(sig syscall.Signal) runtimeapi.Signal { return criSignals[sig] }

// signalNumbers and criSignals derive from the names of the CRI's values: SIGNAL_SIGTERM,
// SIGNAL_SIGRTMINPLUS1, SIGNAL_SIGRTMAXMINUS14. If two names have one number (SIGCHLD and SIGCLD),
// the lower value is reported.
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
