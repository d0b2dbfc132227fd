package oci

import (
	"fmt"
	"syscall"
	"testing"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/testutil"
)

func TestParseSignal(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]syscall.Signal{
		"SIGTERM": 15, "TERM": 15, "term": 15, "sigkill": 9, "15": 15, "1": 1, "64": 64, "SIGWINCH": 28, "SIGPWR": 30,
		"SIGRTMIN": 34, "RTMIN+0": 34, "SIGRTMIN+3": 37, "sigrtmax": 64, "SIGRTMAX-2": 62, "SIGRTMIN+30": 64,
		"SIGIOT": 6, "SIGCLD": 17, "SIGPOLL": 29,
	} {
		if got, err := ParseSignal(text); err != nil || got != want {
			t.Errorf("%q: got %d, %v, want %d", text, got, err, want)
		}
	}
	for _, text := range []string{"", "0", "65", "-1", "SIG", "SIGFOO", "SIGSIGTERM", "RTMIN-1", "RTMAX+1", "RTMIN+31", "RTMIN+", "RTMIN+-1", "15 ", "SIGTERM\n"} {
		sig, err := ParseSignal(text)
		testutil.WantError(t, err, codes.InvalidArgument, "is not a signal")
		if sig != 0 {
			t.Errorf("%q: error, but also %d", text, sig)
		}
	}
}

func TestStopSignal(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		asked runtimeapi.Signal
		image string
		want  syscall.Signal
	}{
		{0, "", 15},
		{0, "SIGQUIT", 3},
		{runtimeapi.Signal_SIGNAL_SIGUSR1, "SIGQUIT", 10},
		{runtimeapi.Signal_SIGNAL_SIGRTMINPLUS3, "", 37},
		{runtimeapi.Signal_SIGNAL_SIGRTMAXMINUS14, "bad", 50},
		{0, "bad", 15},
	} {
		t.Run(fmt.Sprint(test.asked, " ", test.image), func(t *testing.T) {
			if got := StopSignal(test.asked, test.image); got != test.want {
				t.Errorf("%v, %q: got %d, want %d", test.asked, test.image, got, test.want)
			}
		})
	}
	in := testInput()
	in.Image.StopSignal = "SIGFOO"
	mustSpec(t, in) // an image's unusable signal fails no container
	refused(t, func(in *ContainerInput) { in.Config.StopSignal = 999 }, codes.InvalidArgument, "stop_signal", "999")
}

// Every value of the CRI has a number, and converts back to itself or its other name.
func TestCRISignals(t *testing.T) {
	t.Parallel()
	same := map[runtimeapi.Signal]runtimeapi.Signal{
		runtimeapi.Signal_SIGNAL_SIGCLD:  runtimeapi.Signal_SIGNAL_SIGCHLD,
		runtimeapi.Signal_SIGNAL_SIGIOT:  runtimeapi.Signal_SIGNAL_SIGABRT,
		runtimeapi.Signal_SIGNAL_SIGPOLL: runtimeapi.Signal_SIGNAL_SIGIO,
	}
	for value := range runtimeapi.Signal_name {
		s := runtimeapi.Signal(value)
		if s == runtimeapi.Signal_SIGNAL_RUNTIME_DEFAULT {
			continue
		}
		want := s
		if other, ok := same[s]; ok {
			want = other
		}
		sig := StopSignal(s, "")
		if err := CheckStopSignal(s); err != nil || CRISignal(sig) != want {
			t.Errorf("%s: number %d, %v, converts back to %s", s, sig, err, CRISignal(sig))
		}
	}
	if got := CRISignal(32); got != runtimeapi.Signal_SIGNAL_RUNTIME_DEFAULT {
		t.Errorf("32 is %s", got)
	}
}
