"""The shells' completion of the command line, made from its parser: `tfring completion bash`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

SHELLS = ("bash", "zsh")
_FILES, _FOLDERS, _NOTHING = "-f", "-d", ""
_BY_METAVAR = {"FILE": _FILES, "SCRIPT": _FILES, "DIR": _FOLDERS, "FOLDER": _FOLDERS}

# Arguments behind the program that `launch` starts are the program's: files, as a shell does by itself.
_FUNCTION = """\
_tfring() {
  local IFS=$'\\n' word=${COMP_WORDS[COMP_CWORD]} command= before= program= i
  [[ $word != "=" ]] || word=
  for ((i = 1; i < COMP_CWORD; i++)); do
    if [[ ${COMP_WORDS[i]} == "=" ]]; then
      continue
    elif [[ -z $command ]]; then
      [[ ${COMP_WORDS[i]} == -* ]] || command=${COMP_WORDS[i]}
    elif [[ -n $before ]]; then
      before=
    elif [[ ${COMP_WORDS[i]} == -* ]]; then
      case "$command ${COMP_WORDS[i]}" in
@TAKES_VALUE@
      esac
    else
      program=${COMP_WORDS[i]}
    fi
  done
  COMPREPLY=()
  if [[ -n $program && $command == launch ]]; then
    COMPREPLY=($(compgen -f -- "$word"))
    compopt -o filenames 2>/dev/null
    return
  fi
  case "$command $before" in
@VALUES@
  esac
  [[ -z $before ]] || return 0
  case "$command ${word:0:1}" in
@WORDS@
  esac
}
complete -F _tfring tfring
"""


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Returns what a shell evaluates to complete a command.

    Args:
      parser: of a command with commands of its own. Suppressed options are left out.
      shell: one of `SHELLS`; zsh reads bash's function by its own `bashcompinit`.
    """
    [commands] = [a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    parsers: dict[str, argparse.ArgumentParser] = {"": parser, **commands}
    takes_value, values, words = [], [], []
    for name, of in parsers.items():
        options = [a for a in of._actions if a.option_strings and a.help != argparse.SUPPRESS]
        for option in options:
            if option.nargs != 0:
                patterns = "|".join(f"'{name} {string}'" for string in option.option_strings)
                what = "program" if option.nargs == argparse.REMAINDER else "before"
                takes_value.append(f"        {patterns}) {what}=${{COMP_WORDS[i]}} ;;")
                if any(of_option := _possible(option)):
                    values.append(f"    {patterns}) {_complete(*of_option)} ;;")
        positional = [a for a in of._actions if not a.option_strings and a.help != argparse.SUPPRESS]
        strings = _complete([string for option in options for string in option.option_strings])
        words.append(f"    '{name} -') {strings} ;;")
        possible = _possible(positional[0]) if positional else None
        words.append(f"    '{name} '*) {_complete(*possible) if possible else strings} ;;")
    text = _FUNCTION
    for mark, lines in (("TAKES_VALUE", takes_value), ("VALUES", values), ("WORDS", words)):
        text = text.replace(f"@{mark}@", "\n".join(lines))
    return ("autoload -Uz +X bashcompinit && bashcompinit\n" if shell == "zsh" else "") + text


def _possible(action: argparse.Action) -> tuple[list[str], str]:
    """Returns the words that an argument may be, and whether it is a file or a folder."""
    if action.choices is not None:
        return [str(choice) for choice in action.choices], _NOTHING
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    return [], _BY_METAVAR.get(metavar, _NOTHING)


def _complete(words: Sequence[str], kind: str = _NOTHING) -> str:
    """Returns a command that puts the words, and files or folders, that begin like the last word into COMPREPLY."""
    listed = [*([kind] if kind else []), *(["-W $'" + "\\n".join(words) + "'"] if words else [])]
    names = "; compopt -o filenames 2>/dev/null" if kind else ""
    return f'COMPREPLY=($(compgen {" ".join(listed)} -- "$word")){names}'
