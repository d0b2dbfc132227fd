package stats

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"testing"
	"time"

	"berth/internal/testutil"
)

// Sampling takes a tenth of the time, whatever a sample takes and however many containers exist.
func TestRestAfterSample(t *testing.T) {
	t.Parallel()
	for took, want := range map[time.Duration]time.Duration{0: 0, time.Millisecond: 9 * time.Millisecond, time.Second: 9 * time.Second, time.Hour: maxRest} {
		t.Run(took.String(), func(t *testing.T) {
			if got := restAfter(took); got != want {
				t.Errorf("got %v, want %v", got, want)
			}
		})
	}
}

func TestNextToSample(t *testing.T) {
	t.Parallel()
	now := time.Now()
	counted := &Sample{At: now}
	type state struct {
		running, ended bool
		count          *Sample
		due            time.Duration // from now; 0: always due
	}
	for name, c := range map[string]struct {
		containers map[string]state
		want       string // empty: no container is due
		idle       bool   // none will become due
	}{
		"none":                {idle: true},
		"never sampled first": {containers: map[string]state{"a": {running: true, count: counted, due: -time.Hour}, "b": {ended: true}}, want: "b"},
		"longest first": {containers: map[string]state{"a": {running: true, count: counted, due: -time.Minute}, "b": {running: true, count: counted, due: -time.Hour}},
			want: "b"},
		"by ID":             {containers: map[string]state{"b": {}, "a": {}}, want: "a"},
		"not due":           {containers: map[string]state{"a": {running: true, count: counted, due: time.Hour}}},
		"ended and known":   {containers: map[string]state{"a": {ended: true, count: counted}}, idle: true},
		"ended with files":  {containers: map[string]state{"a": {ended: true, count: &Sample{At: now, Processes: &Processes{}}}}, want: "a"},
		"ended afterwards":  {containers: map[string]state{"a": {ended: true, count: &Sample{At: now.Add(-time.Hour)}}}, want: "a"},
		"created and known": {containers: map[string]state{"a": {count: counted}}, idle: true},
	} {
		t.Run(name, func(t *testing.T) {
			counter := NewSampler(SamplerConfig{Targets: func(yield func(Target) bool) {
				for id, s := range c.containers {
					one := Target{ID: id, Running: s.running, State: &SampleState{}}
					one.State.last.Store(s.count)
					if s.ended {
						one.FinishedAt = now.Add(-time.Minute)
					}
					if s.due != 0 {
						one.State.due = now.Add(s.due)
					}
					if !yield(one) {
						return
					}
				}
			}})
			got, wait := counter.next(false)
			if (got == nil) != (c.want == "") || got != nil && got.ID != c.want {
				t.Errorf("got %v", got)
			}
			if got == nil && (wait > 2*time.Hour) != c.idle {
				t.Errorf("next container is due after %v", wait)
			}
		})
	}
}

// A container without clients is sampled rarely. A request makes it due after the period.
func TestContainerWithoutClientsIsSampledRarely(t *testing.T) {
	t.Parallel()
	var sample SampleState
	counted := &Sample{At: time.Now()}
	c := NewSampler(SamplerConfig{Period: time.Minute, Targets: func(yield func(Target) bool) { yield(Target{ID: "a", Running: true, State: &sample}) }})
	if s, _ := c.next(false); s == nil {
		t.Error("a container without a sample is not due")
	}
	sample.last.Store(counted)
	sample.due = time.Now().Add(-time.Second)
	if s, wait := c.next(false); s != nil || wait < (unaskedFactor-2)*time.Minute {
		t.Errorf("without a client: due now: %v, next in %v", s, wait)
	}
	if c.Last(&sample) != counted {
		t.Error("Last returned another sample")
	}
	select {
	case <-c.wake:
	default:
		t.Error("the first request did not wake the sampler")
	}
	if s, _ := c.next(false); s == nil {
		t.Error("requested container is not due")
	}
	c.Last(&sample)
	if len(c.wake) != 0 {
		t.Error("a second request woke the sampler again")
	}
}

func TestAddFiles(t *testing.T) {
	t.Parallel()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	testutil.Must(t, err)
	defer listener.Close()
	var own, gone Processes
	if err := own.addFiles(t.Context(), fmt.Sprintf("/proc/%d/fd/", os.Getpid())); err != nil || own.Files < 4 || own.Sockets < 1 {
		t.Errorf("%+v, %v", own, err)
	}
	if err := gone.addFiles(t.Context(), "/proc/1073741824/fd/"); err != nil || gone != (Processes{}) {
		t.Errorf("%+v, %v", gone, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := gone.addFiles(ctx, "/proc/self/fd/"); !errors.Is(err, context.Canceled) {
		t.Errorf("interrupted: %v", err)
	}
	full := Processes{Files: maxFiles}
	if err := full.addFiles(t.Context(), "/proc/self/fd/"); err != nil || full.Files != maxFiles {
		t.Errorf("%+v, %v", full, err)
	}
}

// A sample stays valid while no process of the pod runs.
func TestIdleSince(t *testing.T) {
	t.Parallel()
	now := time.Now()
	counted := &Sample{At: now.Add(-time.Minute), seen: now.Add(-maxUnseen), usedCPU: "17\n", Processes: &Processes{Files: 3}}
	for name, c := range map[string]struct {
		last *Sample
		used string
		same bool
	}{
		"never sampled":         {nil, "17\n", false},
		"idle":                  {counted, "17\n", true},
		"too long ago":          {&Sample{At: now, seen: now.Add(-maxUnseen - 1), usedCPU: "17\n"}, "17\n", false},
		"ran since":             {counted, "18\n", false},
		"unknown now":           {counted, "", false},
		"always unknown":        {&Sample{}, "", false},
		"unknown at the sample": {&Sample{}, "17\n", false},
	} {
		t.Run(name, func(t *testing.T) {
			var l SampleState
			l.last.Store(c.last)
			got := l.idleSince(c.used, now)
			if (got != nil) != c.same || got != nil && (got.At != now || got.Processes != c.last.Processes) {
				t.Errorf("got %+v", got)
			}
		})
	}
}
