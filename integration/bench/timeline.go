package main

import (
	"cmp"
	"context"
	"slices"
	"time"

	"berth/integration/bench/report"
	"berth/integration/bench/subject"
)

// timelines starts a few pods for the drawings and keeps the median.
func timelines(network string, applies func(*subject.Subject) bool) experiment {
	const pods = 5
	return experiment{
		name: "timelines, " + network, rows: []string{"start-" + network}, applies: applies, warmUp: 1, limit: time.Minute, budget: time.Minute,
		samples: func(int) int { return pods },
		prepare: func(context.Context, *bench, *subject.Subject) (any, error) { return new([]report.Timeline), nil },
		sample: func(ctx context.Context, c *contestant) (values, error) {
			pod, start, err := c.s.Start(ctx, network == "host")
			if err != nil {
				return nil, err
			}
			inner, err := pod.Trace(ctx)
			if err != nil {
				return nil, err
			}
			all := c.state.(*[]report.Timeline)
			*all = append(*all, timeline(c.s, network, start, inner))
			slices.SortFunc(*all, func(a, b report.Timeline) int { return cmp.Compare(a.Took, b.Took) })
			c.b.keepTimeline((*all)[len(*all)/2])
			return nil, pod.Remove(ctx)
		},
	}
}

// timeline returns a start's calls for a drawing, with the daemon's own spans below. These start
// with the call.
func timeline(s *subject.Subject, network string, start subject.Start, inner map[string][]subject.Span) report.Timeline {
	name := s.Column
	if s.BuiltInNetwork {
		name += ", built-in network"
	}
	t := report.Timeline{Network: network, Name: name, Took: start.Total()}
	for _, call := range start.Spans {
		t.Spans = append(t.Spans, report.Span(call))
		for _, span := range inner[call.Name] {
			span.Begin, span.End = call.Begin+span.Begin, call.Begin+span.End
			t.Spans = append(t.Spans, report.Span(span))
		}
	}
	return t
}

func (b *bench) keepTimeline(t report.Timeline) {
	same := func(o report.Timeline) bool { return o.Network == t.Network && o.Name == t.Name }
	if i := slices.IndexFunc(b.timelines, same); i >= 0 {
		b.timelines[i] = t
		return
	}
	b.timelines = append(b.timelines, t)
}
