package state

import (
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"unicode"
	"unicode/utf8"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	crierrors "k8s.io/cri-api/pkg/errors"

	"berth/internal/errdefs"
)

// Names are kubelet's names of a pod, or of a container and its pod. They can be shown on one line.
type Names struct {
	Namespace, Pod string // empty: unknown
	Container      string // empty: the names of a pod
}

// NamesOf returns the names in the metadata of a pod, and of a container if that is not nil.
func NamesOf(pod *runtimeapi.PodSandboxMetadata, container *runtimeapi.ContainerMetadata) Names {
	return Names{errdefs.Clip(pod.GetNamespace()), errdefs.Clip(pod.GetName()), errdefs.Clip(container.GetName())}
}

// Attrs returns the known names as log attributes.
func (n Names) Attrs() []slog.Attr {
	var attrs []slog.Attr
	for _, a := range []slog.Attr{
		slog.String("namespace", n.Namespace), slog.String("podName", n.Pod), slog.String("containerName", n.Container),
	} {
		if a.Value.String() != "" {
			attrs = append(attrs, a)
		}
	}
	return attrs
}

// Explain adds the names to an error that lacks them. It keeps the error's code.
func (n Names) Explain(err error) error {
	if err == nil {
		return nil
	}
	var missing []string
	text := err.Error()
	if n.Pod != "" && !hasWord(text, n.Namespace+"/"+n.Pod) {
		missing = append(missing, "pod "+n.Namespace+"/"+n.Pod)
	}
	if n.Container != "" && !hasWord(text, n.Container) {
		missing = append(missing, "container "+n.Container)
	}
	switch names := strings.Join(missing, ": "); {
	case names == "":
		return err
	case BeginsForKubelet(err):
		return fmt.Errorf("%w (%s)", err, names)
	default:
		return fmt.Errorf("%s: %w", names, err)
	}
}

// BeginsForKubelet reports whether kubelet matches the first words of an error of a container's
// creation. Nothing may stand before them.
func BeginsForKubelet(err error) bool {
	return errors.Is(err, crierrors.ErrImageVolumeMountFailed) || errors.Is(err, crierrors.ErrRROUnsupported)
}

// hasWord returns whether text has word with no letter, digit or hyphen beside it.
func hasWord(text, word string) bool {
	for rest := text; ; {
		before, after, found := strings.Cut(rest, word)
		if !found {
			return false
		}
		last, _ := utf8.DecodeLastRuneInString(before)
		next, _ := utf8.DecodeRuneInString(after)
		if !inName(last) && !inName(next) {
			return true
		}
		rest = after
	}
}

func inName(r rune) bool { return r == '-' || unicode.IsLetter(r) || unicode.IsDigit(r) }
