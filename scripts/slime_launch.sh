# shellcheck shell=bash
# Library of the scripts that run slime with this package. A script sources it, sets model_name (use_model does that), and calls
# the functions that it needs.

repository="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

# shellcheck source=scripts/launch/settings.sh
source "$repository/scripts/launch/settings.sh"
# shellcheck source=scripts/launch/models.sh
source "$repository/scripts/launch/models.sh"
# shellcheck source=scripts/launch/slime.sh
source "$repository/scripts/launch/slime.sh"
# shellcheck source=scripts/launch/ray.sh
source "$repository/scripts/launch/ray.sh"
# shellcheck source=scripts/launch/job.sh
source "$repository/scripts/launch/job.sh"
# shellcheck source=scripts/launch/evaluation.sh
source "$repository/scripts/launch/evaluation.sh"
# shellcheck source=scripts/launch/training.sh
source "$repository/scripts/launch/training.sh"
# shellcheck source=scripts/launch/watch.sh
source "$repository/scripts/launch/watch.sh"
